"""The optimiser: AdamW on float32 masters, with float32 or 8-bit moments, and its state as plain tensors."""

from typing import Any

import torch
from torch import Tensor

from stages.errors import UserError

BETAS = (0.9, 0.95)


def make_optimiser(kind: str, masters: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter, arXiv 1711.05101) without weight decay.

    Args:
        kind: `torch`, or `bitsandbytes`: moments in 8 bits by blocks (Dettmers et al., arXiv 2110.02861).
        masters: float32 tensors.

    Raises:
        UserError: bitsandbytes is needed and not installed.
    """
    if kind == "torch":
        return torch.optim.AdamW(masters, betas=BETAS, weight_decay=0.0, fused=True)
    try:
        import bitsandbytes  # noqa: PLC0415 (takes seconds to import)
    except ImportError as error:
        raise UserError(f"optimiser = {kind!r} needs bitsandbytes ({error}); choose 'torch'") from error
    eight: Any = bitsandbytes.optim
    optimiser: torch.optim.Optimizer = eight.AdamW8bit(masters, betas=BETAS, weight_decay=0.0)
    return optimiser


def state_of(optimiser: torch.optim.Optimizer, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimiser's state for named masters as `name/key` -> tensor."""
    return {
        f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, master in named.items()
        for key, value in optimiser.state[master].items()
    }


def restore(optimiser: torch.optim.Optimizer, named: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Set the optimiser's state for named masters to what `state_of` returned."""
    states: dict[str, dict[str, Any]] = {name: {} for name in named}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        # The 8-bit optimiser counts its steps in an integer, the other in a tensor on the device.
        plain = value.dtype == torch.int64 and value.ndim == 0
        states[name][key] = int(value) if plain else value.to(named[name].device)
    for name, master in named.items():
        optimiser.state[master] = states[name]
