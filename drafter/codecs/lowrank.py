"""A low-rank correction over any codec: the served weight is decoded + left @ right, factors in bfloat16.

The product of two bfloat16 numbers has 16 significant bits; their sum over the rank is taken in float64,
where the order of the terms does not reach the last bit of float32: so devices and block sizes agree.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Placed, Settings


def layout(settings: Settings) -> Layout:
    """`.left` [rows, rank] and `.right` [rank, columns]."""
    (rows, columns), rank = settings["shape"], settings["rank"]
    return {".left": ((rows, rank), torch.bfloat16), ".right": ((rank, columns), torch.bfloat16)}


def parts(settings: Settings, side: Parts) -> Parts:
    """The factors as they are stored."""
    return {suffix: side[suffix[1:]].to(torch.bfloat16) for suffix in layout(settings)}


def remainder(weight: Tensor, side: Parts) -> Tensor:
    """What is left for the codec under a correction: weight - left @ right, float32.

    Raises:
        ValueError: no correction was planned.
    """
    if not {"left", "right"} <= side.keys():
        raise ValueError("a rank was asked for, but no factors were planned")
    return weight - _product(side["left"].to(torch.bfloat16), side["right"].to(torch.bfloat16)).float()


def factors(residual: Tensor, rank: int) -> Parts:
    """Return the factors of the best approximation of a residual at a rank, by SVD (Eckart & Young, 1936).

    Args:
        residual: float32, [rows, columns].
        rank: of the correction, at most the smaller side.
    """
    left, values, right = torch.linalg.svd(residual.double(), full_matrices=False)
    root = values[:rank].sqrt()
    return {"left": (left[:, :rank] * root).to(torch.bfloat16).contiguous(),
            "right": (root[:, None] * right[:rank]).to(torch.bfloat16).contiguous()}  # fmt: skip


def corrected(jobs: Iterator[Decoding], stored: Parts, device: str) -> Iterator[Decoding]:
    """Add the correction to every decoded block."""
    left, right = stored[".left"].to(device), stored[".right"].to(device)
    for job in jobs:
        yield partial(_add, job, left, right)


def _add(job: Decoding, left: Tensor, right: Tensor) -> Callable[[], Placed]:
    return partial(_added, job(), left, right)


def _added(rest: Callable[[], Placed], left: Tensor, right: Tensor) -> Placed:
    rows, values = rest()
    return rows, (values.double() + _product(left[rows], right)).float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.double() @ right.double()
