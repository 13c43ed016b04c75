"""What continuations are like: counts by category, from which the teacher's report is made."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from drafter.engine import Generated

Tally = dict[str, Counter[str]]  # category -> what was counted

GRAM = 8       # tokens; a continuation with more than so many of them twice is a loop
LENGTHS = (1, 9, 33, 65, 129, 257, 513)  # where the bins of lengths begin


def tally(categories: Sequence[str], generated: Sequence[Generated]) -> Tally:
    """Count the rows that have a token: tokens, how they ended, loops, lengths, and top-1 probabilities."""
    found: Tally = {}
    for category, row in zip(categories, generated, strict=True):
        if not row.tokens:
            continue
        counts = found.setdefault(category, Counter())
        counts.update({"rows": 1, "tokens": len(row.tokens), f"ended_{row.ended}": 1,
                       "loops": row.ended == "repeat" or repeats(row.tokens) > GRAM,
                       f"length_{_bin(len(row.tokens))}": 1})  # fmt: skip
        if row.topk_logprobs.shape[1]:
            # In millionths, so that counts are integers and add up alike in any order.
            counts["top1_millionths"] += round(1e6 * float(row.topk_logprobs[:, 0].double().exp().sum()))
    return found


def repeats(tokens: Sequence[int]) -> int:
    """Return how many n-grams of `GRAM` tokens stand earlier in the same text."""
    grams = [tuple(tokens[first : first + GRAM]) for first in range(len(tokens) - GRAM + 1)]
    return len(grams) - len(set(grams))


def added(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of tallies."""
    total: Tally = {}
    for one in tallies:
        for category, counts in one.items():
            total.setdefault(category, Counter()).update(counts)
    return total


def count(found: Tally) -> int:
    """Return how many tokens were counted."""
    return sum(counts["tokens"] for counts in found.values())


def report(found: Tally) -> dict[str, object]:
    """Return shares and means: of all, and of each category."""
    whole: Counter[str] = Counter()
    for counts in found.values():
        whole.update(counts)
    return _shares(whole) | {"categories": {name: _shares(found[name]) for name in sorted(found)}}


def _shares(counts: Counter[str]) -> dict[str, object]:
    rows, tokens = counts["rows"], counts["tokens"]
    if not rows:
        return {"rows": 0, "tokens": 0}
    lengths = {label: counts[f"length_{label}"] for label in map(_bin, LENGTHS) if counts[f"length_{label}"]}
    return {
        "rows": rows, "tokens": tokens, "stop_share": round(counts["ended_stop"] / rows, 4),
        "loop_share": round(counts["loops"] / rows, 4),
        "mean_top1_probability": round(counts["top1_millionths"] / 1e6 / tokens, 4), "lengths": lengths,
    }  # fmt: skip


def _bin(length: int) -> str:
    for first, following in pairwise(LENGTHS):
        if length < following:
            return f"{first}-{following - 1}"
    return f"{LENGTHS[-1]}-"
