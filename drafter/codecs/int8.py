"""int8: codes -127..127 and one bfloat16 step a row, set by the row's largest magnitude.

bytes = rows * columns + 2 * rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Placed, Settings, on_device, row_blocks
from drafter.codecs.rows import inverse, nonzero_steps


def layout(settings: Settings) -> Layout:
    """Codes of the matrix's shape, a step a row."""
    rows, columns = settings["shape"]
    return {".codes": ((rows, columns), torch.int8), ".steps": ((rows,), torch.bfloat16)}


def encode(weight: Tensor, _settings: Settings, _side: Parts | None = None) -> Parts:
    """Quantise [rows, columns] float32 to the nearest code."""
    steps = nonzero_steps(weight.abs().amax(1) / 127)
    codes = (weight * inverse(steps)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return {".codes": codes, ".steps": steps}


def blocks(parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
    """Codes times steps; exact in float32."""
    steps = parts[".steps"].to(device).float()
    for rows in row_blocks(*settings["shape"]):
        yield on_device(_decode, parts[".codes"], steps, rows, device)


def _decode(codes: Tensor, steps: Tensor, rows: slice, device: str) -> Placed:
    return rows, codes[rows].to(device).float().mul_(steps[rows, None])
