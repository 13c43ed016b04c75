"""int4: sixteen levels a group of neighbours in a row, and one bfloat16 step for each group.

The step is set by the group's largest magnitude, with its sign: that value falls on code -8 exactly, and all
sixteen codes -8..7 are in use. With `clip`, each group also tries smaller steps, which cut its largest values
off, and keeps the one of least squared error. bytes = rows * columns / 2 + 2 * rows * columns / group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Placed, Settings, on_device, row_blocks
from drafter.codecs.rows import inverse, nonzero_steps

CLIPS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def layout(settings: Settings) -> Layout:
    """`.codes`: the even column in the low four bits, code + 8. `.scales`: the steps."""
    (rows, columns), group = settings["shape"], settings["group"]
    return {".codes": ((rows, columns // 2), torch.uint8),
            ".scales": ((rows, columns // group), torch.bfloat16)}  # fmt: skip


def encode(weight: Tensor, settings: Settings, _side: Parts | None = None) -> Parts:
    """Quantise [rows, columns] float32; columns must be a multiple of the group.

    Raises:
        ValueError: the columns do not divide into groups.
    """
    levels, scales = _quantised(weight, settings)
    codes = levels.to(torch.uint8).reshape(weight.shape)
    return {".codes": codes[:, ::2] | (codes[:, 1::2] << 4), ".scales": scales[..., 0]}


def round_trip(weight: Tensor, settings: Settings) -> Tensor:
    """Return what decoding an encoded weight gives, without packing codes: training asks at every step."""
    levels, scales = _quantised(weight, settings)
    return levels.sub_(8).mul_(scales.float()).reshape(weight.shape)


def blocks(parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
    """Codes times steps, float32; the product of two short numbers is exact."""
    for rows in row_blocks(*settings["shape"]):
        yield on_device(_decode, parts[".codes"], parts[".scales"], settings["group"], rows, device)


def _decode(packed: Tensor, scales: Tensor, group: int, rows: slice, device: str) -> Placed:
    packed, scales = packed[rows].to(device), scales[rows].to(device)
    levels = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*scales.shape, group)
    return rows, levels.float().sub_(8).mul_(scales.float()[..., None]).flatten(1)


def _quantised(weight: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return levels 0..15 as float32, [rows, groups, group], and steps, bfloat16 [rows, groups, 1]."""
    (rows, columns), group = weight.shape, settings["group"]
    if columns % group:
        raise ValueError(f"{columns} columns do not divide into groups of {group}")
    grouped = weight.float().reshape(rows, -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    full = torch.where(high > -low, high, low) / -8
    scales = nonzero_steps(full)
    if settings.get("clip"):
        scales = _clipped(grouped, full, scales)
    return _levels(grouped, scales), scales


def _levels(grouped: Tensor, scales: Tensor) -> Tensor:
    return (grouped * inverse(scales)).add_(8.5).floor_().clamp_(0, 15)


def _clipped(grouped: Tensor, full: Tensor, scales: Tensor) -> Tensor:
    def error(tried: Tensor) -> Tensor:
        values = _levels(grouped, tried).sub_(8).mul_(tried.float())
        return values.sub_(grouped).square_().sum(-1, keepdim=True)

    least = error(scales)
    for clip in CLIPS:
        tried = nonzero_steps(full * clip)
        found = error(tried)
        better = found < least
        scales, least = torch.where(better, tried, scales), torch.where(better, found, least)
    return scales
