"""Steps of rows or groups: as they are stored, and their inverses, the same on every device."""

import torch
from torch import Tensor

SMALLEST_STEP = torch.finfo(torch.bfloat16).tiny  # below it 1 / step is infinite, and devices differ


def nonzero_steps(steps: Tensor) -> Tensor:
    """Round steps to bfloat16; what is too small for a normal one becomes 0, and its codes with it."""
    stored = steps.to(torch.bfloat16)
    return torch.where(stored.abs() < SMALLEST_STEP, 0, stored)


def inverse(steps: Tensor) -> Tensor:
    """Return 1 / step in float32; 0 for 0."""
    return torch.where(steps != 0, 1 / steps.float(), 0)
