"""fp8: float8 e4m3 and one float32 scale a tensor, set by its largest magnitude.

bytes = rows * columns + 4.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Placed, Settings, on_device, row_blocks

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
SMALLEST = torch.finfo(torch.float32).tiny * LARGEST


def layout(settings: Settings) -> Layout:
    """Codes of the matrix's shape, one scale."""
    rows, columns = settings["shape"]
    return {".codes": ((rows, columns), torch.float8_e4m3fn), ".scale": ((1,), torch.float32)}


def encode(weight: Tensor, _settings: Settings, _side: Parts | None = None) -> Parts:
    """Scale [rows, columns] float32 so that its largest magnitude is 448, and round to the nearest float8."""
    largest = weight.abs().amax()
    # A tensor of zeros, or one whose scale would be no normal number, is all zeros under a scale of 0.
    scale = torch.where(largest < SMALLEST, 0, largest / LARGEST).reshape(1)
    scaled = torch.where(scale != 0, weight / scale, 0).clamp_(-LARGEST, LARGEST)
    return {".codes": scaled.to(torch.float8_e4m3fn), ".scale": scale}


def blocks(parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
    """Codes times the scale, float32."""
    scale = parts[".scale"].to(device)
    for rows in row_blocks(*settings["shape"]):
        yield on_device(_decode, parts[".codes"], scale, rows, device)


def _decode(codes: Tensor, scale: Tensor, rows: slice, device: str) -> Placed:
    return rows, codes[rows].to(device).float().mul_(scale)
