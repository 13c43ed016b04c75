"""The entropy codec's steps, one a row, from how much the loss feels each row."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stages.errors import UserError

FISHER_FLOOR = 0.1  # of the tensor's mean: a row that was seldom seen is not thereby worthless
SMALLEST = 1e-30
LOG_RANGE = 120.0  # steps stay normal numbers of bfloat16

LogSteps = dict[str, Tensor]


def log_steps(tensors: Mapping[str, Tensor], sensitivities: Mapping[str, Tensor],
              exponent: float) -> LogSteps:
    """Return log2 of each row's step, up to one constant for all, float32 [rows], for every matrix.

    log step = (1 - k) log(row rms) - (k / 2) log(F_row + 0.1 F_tensor), with k the exponent and F the rows'
    mean squared gradient. At k = 1 the loss's second-order rise, F step^2 / 24 a weight, is the same in every
    row, which is where a bit moved from one row to another gains nothing (reverse water-filling).

    Args:
        tensors: the weights by name; vectors are left out.
        sensitivities: float32 [rows] for each matrix; may be empty where the exponent is 0.
        exponent: k, 0 (steps follow the rows' rms) to 1.

    Raises:
        UserError: a matrix has no sensitivities, or not one a row, or not finite ones.
    """
    found = {}
    for name in sorted(tensors):
        weight = tensors[name]
        if weight.ndim == 2:
            rms = weight.float().square().mean(1).sqrt().clamp(min=SMALLEST)
            found[name] = (1 - exponent) * rms.log2()
            if exponent:
                found[name] -= exponent / 2 * _felt(name, weight, sensitivities).to(rms.device).log2()
    return found


def to_steps(logs: Tensor, shift: float | Tensor = 0.0) -> Tensor:
    """Return the steps, bfloat16, of log2 steps moved by a constant."""
    return (logs + shift).clamp(-LOG_RANGE, LOG_RANGE).exp2().to(torch.bfloat16)


def _felt(name: str, weight: Tensor, sensitivities: Mapping[str, Tensor]) -> Tensor:
    if name not in sensitivities:
        raise UserError(f"distill left no sensitivities for {name}, by which its rows get their bits: delete "
                        "build/PROFILE/distill and run `make distill` again, or set qat.fisher_exponent = 0")
    rows = sensitivities[name].float()
    if rows.shape != weight.shape[:1] or not bool(torch.isfinite(rows).all()) or bool((rows < 0).any()):
        raise UserError(f"the sensitivities of {name} are not {weight.shape[0]} finite numbers: run "
                        "`make distill` again")
    return (rows + FISHER_FLOOR * rows.mean()).clamp(min=SMALLEST)
