"""Threads for work that leaves the interpreter's lock, each with torch's own threads held to one."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def pool(most: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of a thread a core, at most so many."""
    before = torch.get_num_threads()
    try:
        # A thread's own operations must not be spread over all cores once more.
        with ThreadPoolExecutor(workers(most), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(before)  # threads yet to come take the number that was set last


def workers(most: int) -> int:
    """Return how many threads a pool of at most so many has."""
    return min(most, len(os.sched_getaffinity(0)))
