"""Tau of two drafters on the same conversations, side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drafter.replay import RESAMPLES, interval, tau_of


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

    def statistic(rows: Any) -> float:
        return how(tau_of(a_n2[rows]), tau_of(b_n2[rows]))

    return statistic(slice(None)), *interval(statistic, len(a_n2), RESAMPLES, seed=0)
