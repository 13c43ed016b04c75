"""The server with seams that fail while a file of a fault's name is in the folder FAULTS.

Tests run it as they would run drafter.server; nothing of it is in the product. ALTERED may hold lines such as
`server.DEAF_S = 2`; a server that is to do without kernels has all the time to start.
"""

import errno
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch

from drafter import app, loading, server
from drafter.batcher import PROBE, Batcher
from drafter.engine import Engine
from drafter.settings import PLAIN

FOLDER = Path(os.environ["FAULTS"])
TOO_MUCH = [7, 11, 12, 13]  # a request that no memory suffices for


def asked(name: str) -> bool:
    """Whether a fault is to happen."""
    return (FOLDER / name).exists()


def once(name: str) -> bool:
    """Whether a fault is to happen, now and never again."""
    found = asked(name)
    (FOLDER / name).unlink(missing_ok=True)
    return found


class Faults:
    """Stands between the batcher and what it calls."""

    def __init__(self):
        self.draft, self.gather, self.warm_up = Engine.draft, Batcher._gather, loading.warm_up
        self.poisoned = False

    def drafted(self, engine, requests, count=16):
        """Engine.draft, or the fault that is asked for."""
        while asked("gate"):
            time.sleep(0.005)
        if requests == [PROBE] and not (self.poisoned or asked("broken")):
            return self.draft(engine, requests, count)
        if once("raise") or asked("broken"):
            raise ValueError("a fault for the test")
        if asked("memory") and (len(requests) > 2 or TOO_MUCH in requests):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.poisoned = self.poisoned or once("poison")
        if self.poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if once("hang"):
            time.sleep(1000)
        if once("deaf"):
            re.match(r"(a|a)*$", "a" * 60 + "b")  # for ages in C, while no other thread runs
        if once("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.draft(engine, requests, count)

    def warmed_up(self, *arguments):
        """loading.warm_up, or a kernel that never ends, or has no room to be compiled in."""
        if asked("stuck") and not os.environ.get(PLAIN):
            time.sleep(1000)
        if asked("full") and not os.environ.get(PLAIN):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.warm_up(*arguments)

    async def gathered(self, batcher):
        """Batcher._gather, or the end of its task."""
        batch = await self.gather(batcher)
        if once("task"):
            raise LookupError("the batcher's task ends for the test")
        return batch


def main() -> int:
    """Be drafter.server, with faults."""
    faults = Faults()
    Engine.draft = lambda *arguments: faults.drafted(*arguments)
    Batcher._gather = lambda batcher: faults.gathered(batcher)
    loading.warm_up = faults.warmed_up
    for line in os.environ.get("ALTERED", "").splitlines():
        name, value = line.split(" = ")
        if name == "server.START_S" and os.environ.get(PLAIN):
            continue
        module, constant = name.split(".")
        setattr({"app": app, "server": server}[module], constant, float(value))
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
