"""CUDA graphs: a step of static shape is recorded once and replayed, so that Python costs nothing."""

import gc
import logging
from collections.abc import Callable, Hashable

import torch

from drafter import logs
from drafter.cuda import Graph, Memory


class Graphs:
    """Runs steps by key: from a graph on a GPU, eagerly on a CPU or once a capture has failed.

    A step must read and write tensors that stay in place, and must not look at their values.

    Args:
        device: where steps run.
        enabled: whether to capture them, if that is a GPU.
        frugal: whether the caller can do with less memory: a capture that finds none raises OutOfMemoryError.
    """

    def __init__(self, device: torch.device, enabled: bool = True, frugal: bool = False) -> None:
        self.enabled, self.frugal = enabled and device.type == "cuda", frugal
        self.captured: dict[Hashable, Graph] = {}
        self.memory = Memory() if self.enabled else None
        if self.enabled:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do a step once. `key` names all that the step's shapes depend on."""
        graph = self.captured.get(key)
        if graph is not None:
            graph.replay()
            return
        # The first step of a key runs eagerly: it does the work, and warms up what the capture needs.
        step()
        if self.memory is not None:
            self._capture(key, step, self.memory)

    def disable(self, reason: str) -> None:
        """Run every step eagerly from here on, and say why."""
        self.enabled = False
        self.captured.clear()
        self.memory = None  # with the last graph it goes back to the device
        logs.event(logging.WARNING, "CUDA graphs are not used", reason=reason)

    def _capture(self, key: Hashable, step: Callable[[], None], memory: Memory) -> None:
        collecting = gc.isenabled()
        gc.disable()  # a collection in mid-capture may free what may not be freed there
        try:
            torch.cuda.synchronize()
            self.captured[key] = Graph(step, self.stream, memory)
        except RuntimeError as error:
            if self.frugal and isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self.disable(logs.described(error))  # the step itself was done already
        finally:
            if collecting:
                gc.enable()
