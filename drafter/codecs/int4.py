"""int4: sixteen levels a group of neighbours in a row, and one bfloat16 step for each group.

The step is set by the group's largest magnitude, with its sign: that value falls on code -8 exactly, and all
sixteen codes -8..7 are in use. bytes = rows * columns / 2 + 2 * rows * columns / group.
"""

import torch
from torch import Tensor

from drafter.codecs import Settings


def encode(weight: Tensor, settings: Settings) -> dict[str, Tensor]:
    """Quantise [rows, columns] float32; columns must be a multiple of the group.

    Returns:
        `.codes`: uint8 [rows, columns / 2], the even column in the low four bits, code + 8.
        `.scales`: bfloat16 [rows, columns / group], the steps.

    Raises:
        ValueError: the columns do not divide into groups.
    """
    rows, columns = weight.shape
    group = settings["group"]
    if columns % group:
        raise ValueError(f"{columns} columns do not divide into groups of {group}")
    grouped = weight.float().reshape(rows, -1, group)
    peak = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    scales = (peak / -8).to(torch.bfloat16)
    step = scales.float()
    # A group of zeros (or too small for a bfloat16 step) has step 0: all its codes are 0.
    codes = torch.where(step != 0, grouped / step, 0).round().clamp(-8, 7)
    levels = (codes + 8).to(torch.uint8).reshape(rows, columns)
    return {".codes": levels[:, ::2] | (levels[:, 1::2] << 4), ".scales": scales[..., 0]}


def decode(parts: dict[str, Tensor], settings: Settings) -> Tensor:
    """Return codes * steps, float32 [rows, columns]; the product of two short numbers is exact."""
    rows, columns = settings["shape"]
    packed = parts[".codes"]
    levels = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(rows, -1, settings["group"])
    scales = parts[".scales"].float()[..., None]
    return ((levels.float() - 8) * scales).reshape(rows, columns)
