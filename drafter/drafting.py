"""Drafting over slots: the new tokens of all requests in one pass, then a pass a drafted token.

On a GPU all of it is one CUDA graph for each shape of batch, and the host looks once, at the drafts.
"""

from array import array
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from drafter.graphs import Graphs
from drafter.inference import Inference
from drafter.plain import FEW, NewTokens
from drafter.slots import Lease, Slots

PREFILL_TOKENS = 16_384  # at a time
ALIKE = 16  # tokens: a pass of up to so many takes as long for one
TOKENS = 3  # lines of what a batch is told before its tokens: slots, lengths and sizes


class Drafting:
    """Drafts with one decoder, in the slots themselves.

    Args:
        inference: the decoder's forward pass.
        slots: the cached conversations.
        token_limit: ids from here on are never proposed.
        most: ids of the longest draft.
        static: whether batches are filled up to one of few sizes, as graphs want it: on a GPU.
    """

    def __init__(self, inference: Inference, slots: Slots, token_limit: int, most: int, static: bool) -> None:
        self.inference, self.slots, self.token_limit, self.most = inference, slots, token_limit, most
        self.static, device = static, inference.device
        self.graphs = Graphs(device, enabled=inference.kernels is not None)
        count = len(slots.tokens)
        self.told = torch.zeros((TOKENS + FEW, count), dtype=torch.int64, device=device)
        self.steps = torch.arange(count * FEW, device=device)
        self.drafts_bc = torch.zeros((count, most), dtype=torch.int64, device=device)

    def draft(self, requests: list[list[int]], leases: list[Lease], count: int) -> list[list[int]]:
        """Draft `count` ids for each request; its slot holds it and all but the last of them afterwards."""
        try:
            self.slots.settle(leases)
            self._begin(requests, leases, count)
            self.slots.note(leases, requests)  # while a GPU works
            drafts: list[list[int]] = self.drafts_bc[: len(requests), :count].tolist()
            self.slots.keep(leases, drafts)
        except BaseException:
            self.slots.forget()
            raise
        return drafts

    def rehearse(self, requests: list[list[int]], count: int) -> None:
        """Draft for new requests; on a GPU again, in every shape that batches of their size have.

        There it is done from graphs, too: where that differs, they are not used from here on.

        Raises:
            RuntimeError: a draft comes out empty.
        """
        leases = self.slots.lease(requests)
        eager = self.draft(requests, leases, count)  # all but the last token of each is read first
        if not all(eager):
            raise RuntimeError("the warm-up gave an empty draft")
        if not self.static:
            return
        for new in range(1, 1 + len(self._widths(self.size(len(requests))))):
            # The last tokens run again over the same cache, so that the same sums are taken.
            known = [Lease(lease.target, max(0, len(request) - new), lease.target)
                     for request, lease in zip(requests, leases, strict=True)]  # fmt: skip
            if new > 1:
                eager = self.draft(requests, known, count)
            if self.graphs.enabled and self.draft(requests, known, count) != eager:
                self.graphs.disable(f"drafts of {len(requests)} differ from those made step by step")

    def size(self, rows: int) -> int:
        """Return how many rows a batch of so many takes."""
        return min(1 << (rows - 1).bit_length(), len(self.slots.tokens)) if self.static else rows

    def _widths(self, rows: int) -> range:
        """Return the new tokens a row for which the first pass of a batch has a shape."""
        return range(FEW if self.static and rows * FEW <= ALIKE else 1, FEW + 1)

    def _begin(self, requests: list[list[int]], leases: list[Lease], count: int) -> None:
        lengths = [lease.reused for lease in leases]
        long = [row for row, request in enumerate(requests) if len(request) - lengths[row] > FEW]
        for part in self._portions(long, requests, lengths):
            self._prefill([requests[row][lengths[row] : -1] for row in part], [leases[row] for row in part])
        for row in long:
            lengths[row] = len(requests[row]) - 1
        tails = [request[length:] for request, length in zip(requests, lengths, strict=True)]
        rows = self.size(len(requests))
        width = max(self._widths(rows)[0], *map(len, tails))
        self._tell([lease.target for lease in leases], lengths, tails)
        self.graphs.run((rows, width, count), partial(self._run, rows, width, count))

    def _portions(self, rows: list[int], requests: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Part rows so that the new tokens of each part are few enough for one prefill."""
        parts: list[list[int]] = []
        room = 0
        for row in rows:
            size = len(requests[row]) - lengths[row] - 1
            if size > room:
                parts.append([])
                room = max(PREFILL_TOKENS, size)
            parts[-1].append(row)
            room -= size
        return parts

    def _prefill(self, tails: list[list[int]], leases: list[Lease]) -> None:
        """Cache the tokens of some rows, one row after the other in one flat pass."""
        device = self.inference.device
        sizes_b = torch.tensor([len(tail) for tail in tails], device=device)
        lengths_b = torch.tensor([lease.reused for lease in leases], device=device)
        slots_b = torch.tensor([lease.target for lease in leases], device=device)
        new = NewTokens(sizes_b.cumsum(0) - sizes_b, sizes_b, lengths_b, slots_b)
        tokens_n = torch.tensor([token for tail in tails for token in tail], device=device)
        attend = self.inference.attend(self.slots.cached, new, few=False)
        self.inference.hidden(tokens_n, attend)

    def _tell(self, slots: list[int], lengths: list[int], tails: list[list[int]]) -> None:
        """Send a batch to the device, in one copy. Rows beyond it have no new tokens and write nothing."""
        spare = [0] * (len(self.told[0]) - len(slots))
        padded = [tail + [0] * (FEW - len(tail)) for tail in tails]
        lines = (slots, lengths, map(len, tails), *zip(*padded, strict=True))
        numbers = array("q", chain.from_iterable(chain(line, spare) for line in lines))
        self.told.copy_(torch.frombuffer(numbers, dtype=torch.int64).view_as(self.told))

    def _run(self, rows: int, width: int, count: int) -> None:
        """Draft for what was told: from here on nothing depends on a value, so that a graph can hold it."""
        slots_b, lengths_b, sizes_b = self.told[:TOKENS, :rows]
        tokens_n = self.told[TOKENS : TOKENS + width, :rows].T.flatten()
        firsts_b = self.steps[: rows * width : width].contiguous()  # kernels read it so
        real_b = sizes_b.clamp(max=1)
        for step in range(count):
            new = NewTokens(firsts_b, sizes_b, lengths_b, slots_b)
            hidden_nd = self.inference.hidden(tokens_n, self.inference.attend(self.slots.cached, new))
            if step == 0:
                hidden_nd = hidden_nd[firsts_b + (sizes_b - 1).clamp(min=0)]
            lengths_b = lengths_b + sizes_b
            tokens_n = self._choose(hidden_nd)
            self.drafts_bc[:rows, step] = tokens_n
            firsts_b, sizes_b = self.steps[:rows], real_b

    def _choose(self, hidden_bd: Tensor) -> Tensor:
        return self.inference.decoder.logits(hidden_bd)[:, : self.token_limit].argmax(-1)
