"""Views: what the forward pass sees of the masters: themselves in distillation, rounded in QAT."""

from typing import Protocol

from torch import Tensor

Weights = dict[str, Tensor]


class View(Protocol):
    """Stands between float32 masters and the weights of the forward pass."""

    def __call__(self, masters: Weights) -> Weights:
        """Return what serving will see of the masters, float32; gradients go back through it."""
        ...

    def parameters(self) -> Weights:
        """Return what the view itself has to be trained."""
        ...

    def begin(self, step: int, steps: int, masters: Weights) -> dict[str, float]:
        """Prepare for a step, counted from 0; what comes back is written to the step's line of the log.

        A view that moves its grid here returns something.
        """
        ...

    def state(self) -> Weights:
        """Return what a resumed run needs, beside the parameters."""
        ...

    def restore(self, state: Weights) -> None:
        """Go on from what `state` returned."""
        ...


class Identity:
    """The masters themselves."""

    def __call__(self, masters: Weights) -> Weights:
        """Return the masters."""
        return masters

    def parameters(self) -> Weights:
        """Return nothing: there is nothing to train."""
        return {}

    def begin(self, step: int, steps: int, masters: Weights) -> dict[str, float]:
        """Do nothing."""
        return {}

    def state(self) -> Weights:
        """Return nothing: there is no state."""
        return {}

    def restore(self, state: Weights) -> None:
        """Do nothing."""
