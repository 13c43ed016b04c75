"""Row sensitivities: how much the loss minds a change of a matrix's row."""

from collections.abc import Iterable

import torch
from torch import Tensor

FROZEN_SHARE = 0.1
FELT_STEPS = 16


class RowFisher:
    """The mean square of each row's gradient, averaged over the last half of the steps.

    The empirical Fisher information by rows. A row of Adam's second moment tends to the same mean, over the
    last twenty steps only, which is too few for the rows of rare tokens. Matrices that are not trained are
    measured over the last tenth of the steps, since their gradients cost extra.

    Args:
        rows: the rows of each matrix.
        frozen: the matrices that are not trained.
        steps: how many steps there will be; 0 for a drafter that is only measured, on `FELT_STEPS` batches.
        device: of the sums.
    """

    def __init__(self, rows: dict[str, int], frozen: Iterable[str], steps: int, device: str) -> None:
        self.sums = {name: torch.zeros(count, device=device) for name, count in rows.items()}
        measured = {name: max(1, int(steps * FROZEN_SHARE)) for name in frozen}
        half = -(-steps // 2)
        self.first = dict.fromkeys(rows, 0)
        if steps:
            self.first = {name: steps - measured.get(name, half) for name in rows}
        self.steps = steps or FELT_STEPS

    def wants(self, name: str, step: int) -> bool:
        """Say whether the gradient of a matrix at a step, counted from 0, is measured."""
        return name in self.first and step >= self.first[name]

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Count one step's gradient of a matrix in, [rows, columns]."""
        norms = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32)
        self.sums[name] += norms.square() / gradient.shape[1]

    def means(self) -> dict[str, Tensor]:
        """Return the sensitivities, float32 [rows] for each matrix."""
        return {name: total / (self.steps - self.first[name]) for name, total in self.sums.items()}
