"""int4: sixteen levels a group of neighbours in a row, and one bfloat16 step for each group.

The step is set by the group's largest magnitude, with its sign: that value falls on code -8 exactly, and all
sixteen codes -8..7 are in use. bytes = rows * columns / 2 + 2 * rows * columns / group.
"""

import torch
from torch import Tensor

from drafter.codecs import Settings

SMALLEST_STEP = torch.finfo(torch.bfloat16).tiny  # below it 1 / step is infinite, and devices differ


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
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scales = (torch.where(high > -low, high, low) / -8).to(torch.bfloat16)
    # A group of zeros (or too small for a normal bfloat16 step) has step 0: all its codes are 0.
    scales = torch.where(scales.abs() < SMALLEST_STEP, 0, scales)
    inverse = torch.where(scales != 0, 1 / scales.float(), 0)
    levels = (grouped * inverse).add_(8.5).floor_().clamp_(0, 15).to(torch.uint8).reshape(rows, columns)
    return {".codes": levels[:, ::2] | (levels[:, 1::2] << 4), ".scales": scales[..., 0]}


def decode(parts: dict[str, Tensor], settings: Settings) -> Tensor:
    """Return codes * steps, float32 [rows, columns]; the product of two short numbers is exact.

    Raises:
        ValueError: a part has not the type, or the shape that the tensor's shape and the group ask for.
    """
    rows, columns = settings["shape"]
    packed = _part(parts, ".codes", (rows, columns // 2), torch.uint8)
    scales = _part(parts, ".scales", (rows, columns // settings["group"]), torch.bfloat16)
    levels = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*scales.shape, settings["group"])
    return levels.float().sub_(8).mul_(scales.float()[..., None]).reshape(rows, columns)


def _part(parts: dict[str, Tensor], suffix: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    # Left to itself, a part of another shape might be broadcast to wrong weights without a word.
    part = parts[suffix]
    if part.shape != shape or part.dtype != dtype:
        found = f"{list(part.shape)} of {part.dtype}"
        raise ValueError(f"{suffix}: expected shape {list(shape)} of {dtype}, found {found}")
    return part
