"""Teacher shards: prompts, continuations and the target's top-k at each position, in safetensors."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter import tensorfile
from drafter.engine import Generated
from stages.training.tally import Tally, tally

TALLY, ORIGIN = "tally", "origin"


def write_shard(path: Path, prompts: list[list[int]], generated: list[Generated],
                categories: Sequence[str] = (), origin: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write rows to one shard, tally and origin in the header; rows without a token are left out.

    Args:
        path: where to.
        prompts: token ids.
        generated: a continuation of each.
        categories: of each; all the same unless given.
        origin: who wrote them, if that is no function of the record.
    """
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
    found = tally(categories or [""] * len(prompts), generated)
    told = {ORIGIN: json.dumps(list(origin), sort_keys=True)} if origin else {}
    tensorfile.save(tensors, path, {TALLY: json.dumps(found, sort_keys=True)} | told)


def read_tally(path: Path) -> Tally | None:
    """Return what a shard's rows are like, by category; None where the shard is missing or cut."""
    try:
        with safe_open(path, framework="pt") as shard:
            found = json.loads((shard.metadata() or {})[TALLY])
    except (SafetensorError, OSError, KeyError):
        return None
    return {category: Counter(counts) for category, counts in found.items()}


def read_origin(path: Path) -> list[dict[str, Any]]:
    """Return who wrote a whole shard's rows; nothing where the record says how to write them again."""
    with safe_open(path, framework="pt") as shard:
        found: list[dict[str, Any]] = json.loads((shard.metadata() or {}).get(ORIGIN, "[]"))
    return found


def _joined(lists: list[list[int]]) -> Tensor:
    return torch.tensor([token for tokens in lists for token in tokens], dtype=torch.int32)


def _offsets(lists: list[list[int]]) -> Tensor:
    sizes = torch.tensor([0, *map(len, lists)], dtype=torch.int64)
    return sizes.cumsum(0)
