"""Slots: the keys and values of past requests, kept so that the next one pays for its new tokens only."""

from typing import NamedTuple

import torch

from drafter.config import ModelConfig
from drafter.plain import FEW, Pair

PROBED = 16  # leading tokens that are compared first


class Lease(NamedTuple):
    """Where a request's known prefix is, and where the request itself goes.

    Attributes:
        source: the slot whose first `reused` tokens are the request's own.
        reused: how many tokens need no prefill.
        target: the slot that keeps the request.
    """

    source: int
    reused: int
    target: int


class Slots:
    """A fixed number of cached conversations: the longest common prefix wins (see _best), the oldest goes.

    A slot holds a request and the draft that followed it, all but the draft's last token: what is accepted of
    a draft is cached already.

    Args:
        config: the model's shape.
        count: slots.
        columns: the most tokens of a request and its draft.
        like: a tensor of the type and on the device that the cache is to have.
    """

    def __init__(self, config: ModelConfig, count: int, columns: int, like: torch.Tensor) -> None:
        shape = (config.layers, count, config.kv_heads, columns, config.head_dim)
        self.cached: Pair = (like.new_zeros(shape), like.new_zeros(shape))
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.asked = [0] * count  # how many of the tokens are the request's
        self.used = [0] * count
        self.clock = 0
        self.hits = self.reused = 0  # requests with a known prefix, and the tokens that were not run again

    def lease(self, requests: list[list[int]]) -> list[Lease]:
        """Find a source and a target for each request; no target is given out twice.

        A request that extends all that a slot was asked takes that slot over; one that shares only a part of
        it leaves the slot to its owner and goes to the least recently used one.

        Raises:
            ValueError: there are more requests than slots.
        """
        if len(requests) > len(self.used):
            raise ValueError(f"{len(requests)} requests at once, but there are {len(self.used)} slots")
        self.clock += 1
        matches = [self._best(request) for request in requests]
        taken: set[int] = set()
        leases: list[Lease | None] = [None] * len(requests)
        for row, (slot, length) in enumerate(matches):
            if length >= self.asked[slot] > 0 and slot not in taken:
                taken.add(slot)
                leases[row] = Lease(slot, self._reusable(requests[row], length), slot)
        for row, (slot, length) in enumerate(matches):
            if leases[row] is None:
                free = [s for s in range(len(self.used)) if s not in taken]
                target = min(free, key=lambda s: self.used[s])
                taken.add(target)
                leases[row] = Lease(slot, self._reusable(requests[row], length), target)
        for slot in taken:
            self.used[slot] = self.clock
        found = [lease for lease in leases if lease is not None]
        self.hits += sum(lease.reused > 0 for lease in found)
        self.reused += sum(lease.reused for lease in found)
        return found

    def settle(self, leases: list[Lease]) -> None:
        """Copy the prefixes that are borrowed from another slot; before anything is written."""
        borrowed = [lease for lease in leases if lease.source != lease.target and lease.reused]
        if not borrowed:
            return
        device = self.cached[0].device
        sources = torch.tensor([lease.source for lease in borrowed], device=device)
        targets = torch.tensor([lease.target for lease in borrowed], device=device)
        width = max(lease.reused for lease in borrowed)
        for part in self.cached:
            for layer in part:  # all rows of a layer are read before one is written
                layer[targets, :, :width] = layer[sources, :, :width]

    def note(self, leases: list[Lease], requests: list[list[int]]) -> None:
        """Note the requests that the target slots are about to hold."""
        for lease, request in zip(leases, requests, strict=True):
            self.tokens[lease.target] = request.copy()
            self.asked[lease.target] = len(request)

    def keep(self, leases: list[Lease], drafts: list[list[int]]) -> None:
        """Note the drafts behind them: all but the last token of each is cached."""
        for lease, draft in zip(leases, drafts, strict=True):
            self.tokens[lease.target] += draft[:-1]

    def known(self, request: list[int]) -> int:
        """Return how many leading tokens of a request a slot holds."""
        return self._best(request)[1]

    def forget(self) -> None:
        """Empty every slot: after a fault nothing stored is trusted."""
        self.tokens = [[] for _ in self.tokens]
        self.asked = [0] * len(self.asked)

    def _best(self, request: list[int]) -> tuple[int, int]:
        """Return the slot that spares a request the most work, and the length of their common prefix.

        Mostly that is a slot whose last request this one continues. Where all but a few tokens are known, the
        search ends: these run in one pass, and what another slot may know more is not worth it.
        """
        slot, length = self._continued(request)
        return (slot, length) if 0 < length >= len(request) - FEW else self._longest(request)

    def _continued(self, request: list[int]) -> tuple[int, int]:
        """Return the slot that shares most among those whose last request starts this one; 0, 0 for none."""
        end, held, best, most = len(request), self.tokens, 0, 0
        for slot, size in enumerate(self.asked):
            # The last token tells nearly all others apart, and costs next to nothing.
            if (0 < size <= end and held[slot][size - 1] == request[size - 1]
                    and held[slot][:size] == request[:size]):  # fmt: skip
                length = size + common_prefix(held[slot][size:], request[size:])
                if length > most:
                    best, most = slot, length
        return best, most

    def _longest(self, request: list[int]) -> tuple[int, int]:
        """Return the slot with the longest common prefix, and its length."""
        known = [common_prefix(request, tokens) for tokens in self.tokens]
        most = max(known)
        equal = [slot for slot, length in enumerate(known) if length == most]
        # Of equal ones that which is held in full is preferred: it can be extended in place.
        return min(equal, key=lambda slot: (not 0 < self.asked[slot] <= most, self.asked[slot])), most

    @staticmethod
    def _reusable(request: list[int], length: int) -> int:
        # The last token always runs again: its hidden state gives the first drafted token.
        return min(length, len(request) - 1)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens two sequences share."""
    size = min(len(left), len(right))
    low, high = 0, min(PROBED, size)
    # Most pairs part soon: the part that is compared doubles until it differs, and is then halved.
    while low < size and left[low:high] == right[low:high]:
        low, high = high, min(2 * high, size)
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
