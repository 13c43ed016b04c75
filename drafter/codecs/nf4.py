"""nf4: sixteen levels at the quantiles of a normal distribution, scaled by the largest magnitude of a group.

NormalFloat of Dettmers et al., arXiv 2305.14314; levels, rounding and packing are those of bitsandbytes, bit
for bit, and so is the order: groups run over the flattened matrix, the first value in the high four bits.
bytes = weights / 2 + 4 * weights / group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Placed, Settings, on_device, row_blocks

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
# Where the code changes; close to the midpoints of the levels, in the digits that bitsandbytes writes.
BOUNDS = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544,
    -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
    0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683, 0.5016634166240692,
    0.6427869200706482, 0.8614784181118011,
)  # fmt: skip
SMALLEST = torch.finfo(torch.float32).tiny


def layout(settings: Settings) -> Layout:
    """`.codes`: pairs of the flattened matrix. `.scales`: the largest magnitudes, float32."""
    (rows, columns), group = settings["shape"], settings["group"]
    return {".codes": ((rows, columns // 2), torch.uint8),
            ".scales": ((rows, columns // group), torch.float32)}  # fmt: skip


def encode(weight: Tensor, settings: Settings, _side: Parts | None = None) -> Parts:
    """Quantise [rows, columns] float32; columns must be a multiple of the group.

    Raises:
        ValueError: the columns do not divide into groups.
    """
    rows, columns = weight.shape
    group = settings["group"]
    if columns % group:
        raise ValueError(f"{columns} columns do not divide into groups of {group}")
    grouped = weight.float().reshape(rows, -1, group)
    largest = grouped.abs().amax(-1, keepdim=True)
    scales = torch.where(largest < SMALLEST, 0, largest)  # 1 / scale must be finite
    scaled = torch.where(scales > 0, grouped * (1 / scales), 0)
    bounds = torch.tensor(BOUNDS, device=weight.device)
    levels = torch.bucketize(scaled, bounds).to(torch.uint8).reshape(rows, columns)
    return {".codes": (levels[:, ::2] << 4) | levels[:, 1::2], ".scales": scales[..., 0]}


def blocks(parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
    """Levels times scales, float32."""
    table = torch.tensor(LEVELS, device=device)
    for rows in row_blocks(*settings["shape"]):
        yield on_device(_decode, parts, table, settings["group"], rows, device)


def _decode(parts: Parts, table: Tensor, group: int, rows: slice, device: str) -> Placed:
    packed, scales = parts[".codes"][rows].to(device), parts[".scales"][rows].to(device)
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(-1).int()
    values = table.index_select(0, codes).reshape(*scales.shape, group)
    return rows, values.mul_(scales[..., None]).flatten(1)
