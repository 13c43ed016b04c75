"""Training rows: teacher shards mapped from disk, of which only what a batch needs is read."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stages.errors import UserError

PARTS = ("prompt", "continuation")


@dataclass(frozen=True)
class Row:
    """One training row.

    Attributes:
        prompt: token ids, [P], any integer type.
        continuation: the target's greedy tokens, [C].
        topk_ids: the target's k most likely tokens at each position, [C, k].
        topk_logprobs: their natural-log probabilities, [C, k], any floating type.
    """

    prompt: Tensor
    continuation: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor


class Rows:
    """The rows of some shards, in order.

    Args:
        shards: each one's tensors under the names that `shards.write_shard` gives them.

    Attributes:
        prompt_sizes, continuation_sizes: tokens of each row, int64 [rows].
    """

    def __init__(self, shards: list[dict[str, Tensor]]) -> None:
        self.shards = shards
        counts = torch.tensor([len(shard["prompt_offsets"]) - 1 for shard in shards])
        self._shard_of = torch.arange(len(shards)).repeat_interleave(counts)
        self._first_of = counts.cumsum(0) - counts
        self.prompt_sizes, self.continuation_sizes = (
            torch.cat([shard[f"{part}_offsets"].diff() for shard in shards]) for part in PARTS
        )

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._shard_of)

    def __getitem__(self, index: int) -> Row:
        """Return a row, as views of its shard."""
        number = int(self._shard_of[index])
        shard, own = self.shards[number], index - int(self._first_of[number])
        prompt, continuation = (slice(*shard[f"{part}_offsets"][own : own + 2].tolist()) for part in PARTS)
        return Row(shard["prompt_ids"][prompt], shard["continuation_ids"][continuation],
                   shard["topk_ids"][continuation], shard["topk_logprobs"][continuation])


def read_rows(folder: Path) -> Rows:
    """Map all training shards of a teacher's folder.

    Raises:
        UserError: a shard is damaged, or there is no row.
    """
    shards = []
    for path in sorted(folder.glob("train-*.safetensors")):
        try:
            shard = load_file(path)
            Rows([shard])  # its tensors are there
        except (SafetensorError, OSError, KeyError) as error:
            raise UserError(f"{path}: not a whole shard ({error}); run `make teacher` again") from error
        shards.append(shard)
    rows = Rows(shards) if shards else None
    if not rows:
        raise UserError(f"{folder}: no training row has a continuation; look at the data stage's counts")
    return rows
