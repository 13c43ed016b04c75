"""Batches: which rows a step trains on, and how they are packed into one sequence of tokens.

Rows stand one behind the other without padding. `bounds` says where each begins; attention never crosses it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stages.errors import UserError
from stages.training.rows import Row, Rows

PREFETCHED = 4


@dataclass(frozen=True)
class Batch:
    """Rows of one step, packed.

    Attributes:
        tokens_t: each row's prompt and continuation less its last token, [tokens].
        positions_t: each token's position in its own row, [tokens].
        bounds_s: where each row begins, and last where the tokens end, int32 [rows + 1].
        longest: tokens of the longest row, or more.
        predictors_n: indices into tokens of those that predict a continuation token, [positions].
        targets_n: the target's token for each of them.
        topk_ids_nk, topk_logprobs_nk: the target's distribution there, int64 and float32.
    """

    tokens_t: Tensor
    positions_t: Tensor
    bounds_s: Tensor
    longest: int
    predictors_n: Tensor
    targets_n: Tensor
    topk_ids_nk: Tensor
    topk_logprobs_nk: Tensor

    def to(self, device: str) -> "Batch":
        """Return the same batch on a device; from pinned memory the copy does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Return the same batch in pinned memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.type is Tensor}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed)


class Selection:
    """The rows that can be trained on, each cut to a length.

    Args:
        rows: all rows.
        max_row_tokens: the most tokens of a row that the model sees; what lies behind is cut off.

    Attributes:
        sizes: tokens of each kept row, int64 [kept].
        targets: continuation tokens of each, int64 [kept].
        dropped: how many rows have no continuation token within the length.

    Raises:
        UserError: no row is left: a run on nothing would look healthy.
    """

    def __init__(self, rows: Rows, max_row_tokens: int) -> None:
        room = max_row_tokens + 1 - rows.prompt_sizes
        kept = (room > 0) & (rows.continuation_sizes > 0)
        if not bool(kept.any()):
            raise UserError(
                f"none of {len(rows)} rows has a continuation token within max_row_tokens = "
                f"{max_row_tokens}; raise it, or look at the data stage's counts"
            )
        self.rows = rows
        self.numbers = kept.nonzero()[:, 0]
        self.targets = torch.minimum(room, rows.continuation_sizes)[kept]
        self.sizes = rows.prompt_sizes[kept] + self.targets - 1
        self.dropped = len(rows) - len(self.numbers)

    def __len__(self) -> int:
        """Return how many rows are kept."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        """Return a kept row, cut."""
        row, size = self.rows[int(self.numbers[index])], int(self.targets[index])
        return Row(row.prompt, row.continuation[:size], row.topk_ids[:size], row.topk_logprobs[:size])


class Schedule:
    """The rows of every step, a function of seed and step alone: each epoch a fresh order, cut into batches.

    Args:
        sizes: tokens of each row, [rows].
        batch_tokens: the most tokens of a batch; at least the largest size.
        seed: of the orders.
    """

    def __init__(self, sizes: Tensor, batch_tokens: int, seed: int) -> None:
        self.sizes, self.batch_tokens, self.seed = sizes, batch_tokens, seed
        self.epoch, self.first, self.batches = 0, 0, self._epoch(0)

    def rows(self, step: int) -> list[int]:
        """Return the row numbers of a step, counted from 0."""
        if step < self.first:
            self.epoch, self.first, self.batches = 0, 0, self._epoch(0)
        while step >= self.first + len(self.batches):
            self.first += len(self.batches)
            self.epoch += 1
            self.batches = self._epoch(self.epoch)
        return self.batches[step - self.first]

    def _epoch(self, epoch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.sizes), generator=random)
        return [part.tolist() for part in torch.split(order, cut(self.sizes[order], self.batch_tokens))]


def cut(sizes: Tensor, batch_tokens: int) -> list[int]:
    """Return how many rows each batch takes, filling one after the other in the order given.

    Args:
        sizes: tokens of each row, none over batch_tokens.
        batch_tokens: the most tokens of a batch.
    """
    ends = sizes.cumsum(0)
    counts, first, before = [], 0, 0
    while first < len(sizes):
        last = int(torch.searchsorted(ends, before + batch_tokens, right=True))
        counts.append(last - first)
        first, before = last, int(ends[last - 1])
    return counts


def collate(rows: list[Row], width: int = 0, longest: int = 0) -> Batch:
    """Pack rows into one sequence.

    Args:
        rows: at least one.
        width: tokens of the batch; what the rows leave free is filled with token 0 in rows of its own, which
            nothing looks at. 0 is as many as the rows have. A compiled model needs one width for all batches.
        longest: the value of Batch.longest; 0 takes the longest row's.
    """
    texts = [torch.cat((row.prompt, row.continuation[:-1])) for row in rows]
    sizes = [len(text) for text in texts]
    used, longest = sum(sizes), longest or max(sizes)
    fill = [min(longest, width - at) for at in range(used, width, longest)]
    bounds_s = torch.tensor([0, *sizes, *fill]).cumsum(0).to(torch.int32)
    predictors = [
        torch.arange(int(end) - len(row.continuation), int(end))
        for row, end in zip(rows, bounds_s[1:], strict=False)
    ]
    return Batch(
        tokens_t=torch.cat([*texts, texts[0].new_zeros(sum(fill))]).long(),
        positions_t=torch.cat([torch.arange(size) for size in (*sizes, *fill)]),
        bounds_s=bounds_s,
        longest=longest,
        predictors_n=torch.cat(predictors),
        targets_n=torch.cat([row.continuation for row in rows]).long(),
        topk_ids_nk=torch.cat([row.topk_ids for row in rows]).long(),
        topk_logprobs_nk=torch.cat([row.topk_logprobs for row in rows]).float(),
    )


def prefetched(batches: Iterator[Batch], pin: bool) -> Iterator[Batch]:
    """Make the next batches in a thread while this one is trained on, in pinned memory where asked."""
    def make() -> Batch | None:
        batch = next(batches, None)
        return batch.pinned() if batch and pin else batch

    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(make) for _ in range(PREFETCHED)]
        while (batch := waiting.pop(0).result()) is not None:
            waiting.append(pool.submit(make))
            yield batch
