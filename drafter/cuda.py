"""CUDA graphs by the driver itself.

torch.cuda.CUDAGraph sets the state of a random generator on the stream that it records. Once kernels have run
on a second stream a few times, the driver leaves wider gaps between all kernels of the process for good: 0.2
to 0.35 microseconds each on an H200, a millisecond for a draft of 3,400 kernels. Here nothing ever runs on
the stream that is recorded.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

THREAD_LOCAL = 1  # what other threads do meanwhile, allocating say, does not spoil a recording
OUT_OF_MEMORY = 2


class Memory:
    """Where recorded steps have their own tensors: replays write to them, so nobody else may have them."""

    def __init__(self) -> None:
        self.pool = torch.cuda.MemPool()
        # Bound here: at the end of the process their modules may be gone first.
        self._synchronize, self._keep = torch.cuda.synchronize, ctypes.pythonapi.Py_IncRef

    def __del__(self) -> None:
        """Give it back, unless the device is lost: there torch ends the process over it."""
        try:
            self._synchronize()
        except Exception:  # a lost device, or the end of the process, where anything may be gone
            self._keep(ctypes.py_object(self.pool))


class Graph:
    """The kernels of a step, recorded once.

    The calling thread must have used the device before.

    Args:
        step: launches kernels over tensors that stay in place, and looks at no value.
        stream: where they are recorded; not the default one.
        memory: where the step's own tensors come from; graphs that never run at once may share it.

    Raises:
        torch.cuda.OutOfMemoryError: there is no memory for it.
        RuntimeError: the step cannot be recorded.
    """

    def __init__(self, step: Callable[[], None], stream: torch.cuda.Stream, memory: Memory) -> None:
        self._memory, self._device, self._made = memory, stream.device, ctypes.c_void_p()
        self._destroy = function("cuGraphExecDestroy")
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(memory.pool):
            graph = _recorded(step, ctypes.c_void_p(stream.cuda_stream))
        try:
            call("cuGraphInstantiateWithFlags", ctypes.byref(self._made), graph, ctypes.c_ulonglong(0))
        finally:
            call("cuGraphDestroy", graph)

    def replay(self) -> None:
        """Launch the kernels on the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        call("cuGraphLaunch", self._made, ctypes.c_void_p(stream))

    def __del__(self) -> None:
        """Give it back to the driver."""
        if self._made:
            self._destroy(self._made)


def _recorded(step: Callable[[], None], stream: ctypes.c_void_p) -> ctypes.c_void_p:
    graph = ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", stream, ctypes.c_int(THREAD_LOCAL))
    try:
        step()
    except BaseException:
        # The stream must come out of it; what the driver says of a spoilt recording is no news.
        function("cuStreamEndCapture")(stream, ctypes.byref(graph))
        if graph:
            function("cuGraphDestroy")(graph)
        raise
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    return graph


def call(name: str, *arguments: Any) -> None:
    """Call the driver.

    Raises:
        torch.cuda.OutOfMemoryError: the device has no memory left.
        RuntimeError: it refuses; the message has its own words.
    """
    code = function(name)(*arguments)
    if code:
        words = ctypes.c_char_p()
        function("cuGetErrorString")(code, ctypes.byref(words))
        kind = torch.cuda.OutOfMemoryError if code == OUT_OF_MEMORY else RuntimeError
        raise kind(f"CUDA error: {(words.value or b'unknown').decode()} ({name}: {code})")


def function(name: str) -> Any:
    """Return a function of the driver.

    Raises:
        RuntimeError: it has none of that name.
    """
    try:
        return getattr(driver(), name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"CUDA error: no {name} ({error})") from error


@cache
def driver() -> Any:
    """Return the driver's library, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
