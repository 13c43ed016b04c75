"""Tau of two drafters on the same conversations, side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def ratio(first: float, second: float) -> float:
    """Return how many times the second the first is."""
    return first / second


def difference(first: float, second: float) -> float:
    """Return by how much the first is more."""
    return first - second


def compared(first: Sequence[Any], second: Sequence[Any],
             how: Callable[[float, float], float]) -> tuple[float, float, float]:
    """Compare tau of two drafters on the same conversations.

    Args:
        first: tokens and steps of each conversation, [conversations, 2], once for each seed.
        second: the same of another; seeds are added up.
        how: ratio or difference.

    Returns:
        The figure, and its 95% bootstrap interval, conversations resampled in pairs.
    """
    a_n2, b_n2 = (np.array(counts, np.int64).sum(0) for counts in (first, second))
    a_n2, b_n2 = a_n2[a_n2[:, 0] > 0], b_n2[b_n2[:, 0] > 0]
    random = np.random.default_rng(0)

    def tau(counts_n2: Any) -> float:
        tokens, steps = counts_n2.sum(0)
        return float(tokens / steps)

    drawn = [random.integers(0, len(a_n2), len(a_n2)) for _ in range(RESAMPLES)]
    low, high = np.quantile([how(tau(a_n2[rows]), tau(b_n2[rows])) for rows in drawn], [0.025, 0.975])
    return how(tau(a_n2), tau(b_n2)), float(low), float(high)
