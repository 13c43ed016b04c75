"""Drafters that know next to nothing, which a trained one must beat. For reports only: they never ship."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from drafter.replay import DRAFT_TOKENS
from stages.errors import UserError

LONGEST_MATCH = 3


@dataclass(frozen=True)
class Trigrams:
    """Greedy choice after the last two ids, or the last one, or none, as the training continuations have it.

    Attributes:
        base: above every id; a pair (a, b) is looked up as a * base + b.
        after_two, after_one: the most frequent next id (the smallest of equals).
        after_none: the most frequent id.
    """

    base: int
    after_two: dict[int, int]
    after_one: dict[int, int]
    after_none: int

    def draft(self, context: Sequence[int]) -> list[int]:
        """Return the ids that the table goes on with after a context of any length."""
        first, second = (-1, -1, *context[-2:])[-2:]
        drafted = []
        for _ in range(DRAFT_TOKENS):
            one = self.after_one.get(second, self.after_none)
            # Ids that training never saw may be above the base and must not meet another pair's number.
            known = 0 <= first < self.base and 0 <= second < self.base
            token = self.after_two.get(first * self.base + second, one) if known else one
            drafted.append(token)
            first, second = second, token
        return drafted


def fit_trigrams(ids_m: Any, offsets_r1: Any) -> Trigrams:
    """Count the training continuations.

    Args:
        ids_m: [M] all continuations, one after another.
        offsets_r1: [R + 1] where each begins, and the end of the last.

    Raises:
        ValueError: there is no id to count.
    """
    ids_m = np.asarray(ids_m, dtype=np.int64)
    offsets_r1 = np.asarray(offsets_r1, dtype=np.int64)
    if not len(ids_m):
        raise ValueError("there is no training continuation to count")
    place_m = np.arange(len(ids_m)) - np.repeat(offsets_r1[:-1], np.diff(offsets_r1))
    base = int(ids_m.max()) + 1
    tables = [_most_frequent(ids_m, place_m, order, base) for order in (2, 1, 0)]
    return Trigrams(base, tables[0], tables[1], tables[2][0])


def _most_frequent(ids_m: Any, place_m: Any, order: int, base: int) -> dict[int, int]:
    """Return, for each context of `order` ids within one continuation, the most frequent next id."""
    at_n = np.flatnonzero(place_m >= order)
    contexts_n = np.zeros(len(at_n), dtype=np.int64)
    for back in range(order, 0, -1):
        contexts_n = contexts_n * base + ids_m[at_n - back]
    # base ** 3 is below 2 ** 63 for every vocabulary under two million.
    keys_u, counts_u = np.unique(contexts_n * base + ids_m[at_n], return_counts=True)
    contexts_u, tokens_u = np.divmod(keys_u, base)
    rank_u = np.lexsort((tokens_u, -counts_u, contexts_u))
    found_c, first_c = np.unique(contexts_u[rank_u], return_index=True)
    return dict(zip(found_c.tolist(), tokens_u[rank_u][first_c].tolist(), strict=True))


def trigrams_of(teacher: Path) -> Trigrams:
    """Count the training continuations in a folder of teacher shards.

    Raises:
        UserError: there are no shards, or there is no continuation in them.
    """
    ids, offsets, end = [], [np.zeros(1, dtype=np.int64)], 0
    for path in sorted(teacher.glob("train-*.safetensors")):
        with safe_open(path, framework="numpy") as shard:
            ids.append(shard.get_tensor("continuation_ids"))
            offsets.append(shard.get_tensor("continuation_offsets")[1:] + end)
        end += len(ids[-1])
    if not end:
        raise UserError(f"{teacher}: no training continuation for the trigram baseline. Run make teacher.")
    return fit_trigrams(np.concatenate(ids), np.concatenate(offsets))


def prompt_lookup(context: Sequence[int]) -> list[int]:
    """Copy what followed the latest earlier place that ends like the context: in three ids, two, or one."""
    end = len(context) - 1
    best, place = 0, 0
    for index in range(end - 1, -1, -1):
        length = 0
        while length < LONGEST_MATCH and length <= index and context[index - length] == context[end - length]:
            length += 1
        if length > best:
            best, place = length, index
            if best == LONGEST_MATCH:
                break
    return list(context[place + 1 : place + 1 + DRAFT_TOKENS]) if best else []
