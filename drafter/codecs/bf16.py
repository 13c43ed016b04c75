"""bfloat16: half the bytes of float32, for norms and for weights that are not quantised."""

import torch
from torch import Tensor

from drafter.codecs import Settings


def encode(weight: Tensor, settings: Settings) -> dict[str, Tensor]:
    """Round to the nearest bfloat16."""
    return {"": weight.to(torch.bfloat16)}


def decode(parts: dict[str, Tensor], settings: Settings) -> Tensor:
    """Widen to float32; exact."""
    return parts[""].float().reshape(settings["shape"])
