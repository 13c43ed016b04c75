"""Teacher shards: prompts, continuations and the target's top-k at each position, in safetensors."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafter import tensorfile
from drafter.engine import Generated
from stages.errors import UserError


@dataclass(frozen=True)
class Row:
    """One training row.

    Attributes:
        prompt: token ids, [P].
        continuation: the target's greedy tokens, [C].
        topk_ids: the target's k most likely tokens at each position, [C, k].
        topk_logprobs: their natural-log probabilities, [C, k], float32.
    """

    prompt: Tensor
    continuation: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor


def write_shard(path: Path, prompts: list[list[int]], generated: list[Generated]) -> None:
    """Write rows to one shard, its counts in the header; rows without a token are left out."""
    kept = [(prompt, row) for prompt, row in zip(prompts, generated, strict=True) if row.tokens]
    width = kept[0][1].topk_ids.shape[1] if kept else 0
    tensors = {
        "prompt_ids": _joined([prompt for prompt, _ in kept]),
        "prompt_offsets": _offsets([prompt for prompt, _ in kept]),
        "continuation_ids": _joined([row.tokens for _, row in kept]),
        "continuation_offsets": _offsets([row.tokens for _, row in kept]),
        "topk_ids": torch.cat([torch.zeros(0, width).int(), *(row.topk_ids for _, row in kept)]),
        "topk_logprobs": torch.cat([torch.zeros(0, width), *(row.topk_logprobs for _, row in kept)]).half(),
    }
    tokens = len(tensors["continuation_ids"])
    counts = Counter({"rows": len(kept), "tokens": tokens})
    counts.update(f"ended_{row.ended}" for _, row in kept)
    tensorfile.save(tensors, path, {name: str(count) for name, count in counts.items()})


def read_counts(path: Path) -> Counter[str] | None:
    """Return a shard's counts: rows, tokens, and rows by how they ended; None where it is missing or cut."""
    try:
        with safe_open(path, framework="pt") as shard:
            return Counter({name: int(count) for name, count in (shard.metadata() or {}).items()})
    except (SafetensorError, OSError):
        return None


def read_shards(folder: Path) -> list[Row]:
    """Read all training rows of a teacher's folder, in order.

    Raises:
        UserError: a shard is damaged, or there is no row.
    """
    rows: list[Row] = []
    for path in sorted(folder.glob("train-*.safetensors")):
        try:
            rows += _rows(load_file(path))
        except (SafetensorError, OSError, KeyError) as error:
            raise UserError(f"{path}: not a whole shard ({error}); run `make teacher` again") from error
    if not rows:
        raise UserError(f"{folder}: no training row has a continuation; look at the data stage's counts")
    return rows


def _joined(lists: list[list[int]]) -> Tensor:
    return torch.tensor([token for tokens in lists for token in tokens], dtype=torch.int32)


def _offsets(lists: list[list[int]]) -> Tensor:
    sizes = torch.tensor([0, *map(len, lists)], dtype=torch.int64)
    return sizes.cumsum(0)


def _rows(tensors: dict[str, Tensor]) -> list[Row]:
    prompt_at, continuation_at = (tensors[f"{part}_offsets"].tolist() for part in ("prompt", "continuation"))
    rows = []
    for index in range(len(prompt_at) - 1):
        prompt = slice(prompt_at[index], prompt_at[index + 1])
        continuation = slice(continuation_at[index], continuation_at[index + 1])
        rows.append(
            Row(
                tensors["prompt_ids"][prompt].long(),
                tensors["continuation_ids"][continuation].long(),
                tensors["topk_ids"][continuation].long(),
                tensors["topk_logprobs"][continuation].float(),
            )
        )
    return rows
