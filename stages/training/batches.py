"""Batches: which rows a step trains on, a function of seed and step alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.errors import UserError
from stages.training.shards import Row

BUCKET_BATCHES = 16


@dataclass(frozen=True)
class Batch:
    """Rows of one step, padded on the right.

    Attributes:
        tokens_bt: prompt and continuation less its last token, [rows, tokens].
        predictors_n: flat indices into [rows * tokens] of the positions that predict a continuation token.
        targets_n: the target's token for each of them.
        topk_ids_nk, topk_logprobs_nk: the target's distribution there.
    """

    tokens_bt: Tensor
    predictors_n: Tensor
    targets_n: Tensor
    topk_ids_nk: Tensor
    topk_logprobs_nk: Tensor

    def to(self, device: str) -> "Batch":
        """Return the same batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def trainable(rows: list[Row], max_row_tokens: int) -> tuple[list[Row], int]:
    """Cut rows to a length, leave out those without a token to predict, and count what was left out.

    Raises:
        UserError: no row is left: a run on nothing would look healthy.
    """
    kept = []
    for row in rows:
        room = max_row_tokens + 1 - len(row.prompt)
        if room > 0 and len(row.continuation) > 0:
            kept.append(
                Row(row.prompt, row.continuation[:room], row.topk_ids[:room], row.topk_logprobs[:room])
            )
    if not kept:
        raise UserError(
            f"none of {len(rows)} rows has a continuation token within max_row_tokens = {max_row_tokens}; "
            "raise it, or look at the data stage's counts"
        )
    return kept, len(rows) - len(kept)


class Schedule:
    """The rows of every step: each epoch a fresh order, in batches of like length."""

    def __init__(self, sizes: list[int], batch_rows: int, seed: int) -> None:
        self.sizes = torch.tensor(sizes)
        self.batch_rows = batch_rows
        self.seed = seed
        self.epoch = -1
        self.order: list[list[int]] = []

    def rows(self, step: int) -> list[int]:
        """Return the row numbers of a step, counted from 0."""
        per_epoch = -(-len(self.sizes) // self.batch_rows)
        epoch, index = divmod(step, per_epoch)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self._epoch(epoch)
        return self.order[index]

    def _epoch(self, epoch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.sizes), generator=random)
        # Sorting within buckets keeps padding low; the batches are then shuffled again.
        bucket = self.batch_rows * BUCKET_BATCHES
        parts = torch.split(shuffled, bucket)
        ordered = torch.cat([part[self.sizes[part].argsort(stable=True)] for part in parts])
        batches = [part.tolist() for part in torch.split(ordered, self.batch_rows)]
        return [batches[index] for index in torch.randperm(len(batches), generator=random).tolist()]


def collate(rows: list[Row]) -> Batch:
    """Pad rows to one batch; padding comes after the real tokens, so a causal model never sees it."""
    texts = [torch.cat((row.prompt, row.continuation[:-1])) for row in rows]
    width = max(map(len, texts))
    predictors = [
        torch.arange(len(row.continuation)) + (index * width + len(row.prompt) - 1)
        for index, row in enumerate(rows)
    ]
    return Batch(
        torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
        torch.cat(predictors),
        torch.cat([row.continuation for row in rows]),
        torch.cat([row.topk_ids for row in rows]),
        torch.cat([row.topk_logprobs for row in rows]),
    )
