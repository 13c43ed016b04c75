"""CUDA graphs by the driver itself.

torch.cuda.CUDAGraph sets the state of a random generator on the stream that it records, and again before each
replay. Once kernels have run on a second stream a few times, the driver leaves wider gaps between all kernels
of the process for good: 0.2 to 0.35 microseconds each on an H200, a millisecond for a draft of 3,400 kernels.
Here nothing ever runs on the stream that is recorded.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

THREAD_LOCAL = 1  # what other threads do meanwhile, allocating say, does not spoil a recording


class Graph:
    """The kernels of a step, recorded once.

    The calling thread must have used the device before.

    Args:
        step: launches kernels over tensors that stay in place, and looks at no value.
        stream: where they are recorded; not the default one.
        pool: where the step's own tensors come from: replays write to them, so nobody else may have them.

    Raises:
        RuntimeError: the step cannot be recorded, or there is no memory for it.
    """

    def __init__(self, step: Callable[[], None], stream: torch.cuda.Stream, pool: torch.cuda.MemPool) -> None:
        self._pool, self._made = pool, ctypes.c_void_p()
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            graph = _recorded(step, ctypes.c_void_p(stream.cuda_stream))
        try:
            call("cuGraphInstantiateWithFlags", ctypes.byref(self._made), graph, ctypes.c_ulonglong(0))
        finally:
            call("cuGraphDestroy", graph)

    def replay(self) -> None:
        """Launch the kernels on the current stream."""
        call("cuGraphLaunch", self._made, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    def __del__(self) -> None:
        """Give it back to the driver."""
        if self._made:
            driver().cuGraphExecDestroy(self._made)


def _recorded(step: Callable[[], None], stream: ctypes.c_void_p) -> ctypes.c_void_p:
    graph = ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", stream, ctypes.c_int(THREAD_LOCAL))
    try:
        step()
    except BaseException:
        # The stream must come out of it; what the driver says of a spoilt recording is no news.
        driver().cuStreamEndCapture(stream, ctypes.byref(graph))
        if graph:
            driver().cuGraphDestroy(graph)
        raise
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    return graph


def call(name: str, *arguments: Any) -> None:
    """Call the driver.

    Raises:
        RuntimeError: it refuses; the message has its own words.
    """
    code = getattr(driver(), name)(*arguments)
    if code:
        words = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(words))
        raise RuntimeError(f"CUDA error: {(words.value or b'unknown').decode()} ({name}: {code})")


@cache
def driver() -> Any:
    """Return the driver's library, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")
