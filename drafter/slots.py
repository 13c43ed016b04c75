"""Slots: the keys and values of past requests, kept so that the next one pays for its new tokens only."""

from dataclasses import dataclass

import torch

from drafter.cache import KVCache
from drafter.model import Decoder


@dataclass(frozen=True)
class Lease:
    """Where a request's known prefix is read from, and where the whole of it is kept.

    Attributes:
        source: the slot whose first `reused` tokens are the request's own.
        reused: how many tokens need no prefill.
        target: the slot that keeps the request afterwards.
    """

    source: int
    reused: int
    target: int


class Slots:
    """A fixed number of cached conversations: the longest common prefix wins, the oldest goes."""

    def __init__(self, decoder: Decoder, count: int, columns: int) -> None:
        self.store = KVCache.empty(decoder, count, columns)
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.used = [0] * count
        self.clock = 0

    def lease(self, requests: list[list[int]]) -> list[Lease]:
        """Find a source and a target for each request; no target is given out twice.

        A request that extends all that a slot holds takes that slot over; one that shares only a part of it
        leaves the slot to its owner and goes to the least recently used one.

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
            if length == len(self.tokens[slot]) and length > 0 and slot not in taken:
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
        return [lease for lease in leases if lease is not None]

    def gather(self, leases: list[Lease], columns: int) -> KVCache:
        """Return a batch's own cache of `columns` columns, which starts with the leased prefixes."""
        index = torch.tensor([lease.source for lease in leases], device=self.store.keys_lbkcd.device)
        width = max(lease.reused for lease in leases)
        parts = []
        for stored in (self.store.keys_lbkcd, self.store.values_lbkcd):
            shape = (*stored.shape[:1], len(leases), stored.shape[2], columns + 1, stored.shape[4])
            part = stored.new_zeros(shape)
            part[:, :, :, :width] = stored[:, index, :, :width]
            parts.append(part)
        return KVCache(parts[0], parts[1], [lease.reused for lease in leases])

    def keep(self, leases: list[Lease], requests: list[list[int]], cache: KVCache) -> None:
        """Store the requests' own tokens (never the drafted ones) in their target slots."""
        for row, (lease, request) in enumerate(zip(leases, requests, strict=True)):
            first = lease.reused if lease.source == lease.target else 0
            columns = slice(first, len(request))
            self.store.keys_lbkcd[:, lease.target, :, columns] = cache.keys_lbkcd[:, row, :, columns]
            self.store.values_lbkcd[:, lease.target, :, columns] = cache.values_lbkcd[:, row, :, columns]
            self.tokens[lease.target] = list(request)

    def forget(self) -> None:
        """Empty every slot: after a fault nothing stored is trusted."""
        self.tokens = [[] for _ in self.tokens]

    def _best(self, request: list[int]) -> tuple[int, int]:
        lengths = [common_prefix(request, tokens) for tokens in self.tokens]
        best = max(lengths)
        # Among equal matches the one held in full is preferred: it can be extended in place.
        slot = min(range(len(lengths)), key=lambda s: (-lengths[s], len(self.tokens[s])))
        return slot, best

    @staticmethod
    def _reusable(request: list[int], length: int) -> int:
        # The last token always runs again: its hidden state gives the first drafted token.
        return min(length, len(request) - 1)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens two sequences share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
