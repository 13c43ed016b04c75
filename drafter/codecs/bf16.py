"""bfloat16: half the bytes of float32, for norms and for weights that are not quantised."""

from collections.abc import Iterator

import torch
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Placed, Settings, on_device, row_blocks


def layout(settings: Settings) -> Layout:
    """One part, of the tensor's own shape."""
    return {"": (tuple(settings["shape"]), torch.bfloat16)}


def encode(weight: Tensor, _settings: Settings, _side: Parts | None = None) -> Parts:
    """Round to the nearest bfloat16."""
    return {"": weight.to(torch.bfloat16)}


def round_trip(weight: Tensor, _settings: Settings) -> Tensor:
    """Return what decoding an encoded weight gives."""
    return weight.to(torch.bfloat16).float()


def blocks(parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
    """Widen to float32; exact."""
    columns = settings["shape"][1] if len(settings["shape"]) > 1 else 1
    for rows in row_blocks(settings["shape"][0], columns):
        yield on_device(_decode, parts[""], rows, device)


def _decode(stored: Tensor, rows: slice, device: str) -> Placed:
    return rows, stored[rows].to(device).float()
