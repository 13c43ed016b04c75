"""Arms of a bench, taken from one list by a worker on each GPU; each leaves one line of JSON.

An arm is claimed by a lock on a file of its own, which goes with the process that holds it: whoever comes
later, or after a kill, goes on with what has neither a line nor a living worker.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch

from stages.errors import UserError
from stages.files import digest_of
from stages.wrapper.runner import compiler_caches

ROOT = Path(__file__).resolve().parent.parent

Line = dict[str, Any]


class Lines:
    """What the arms have given, one JSON object a line.

    Args:
        path: the file; beside it is a folder for claims and whatever else the workers share.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.shared = path, path.with_suffix(".shared")
        self.shared.mkdir(parents=True, exist_ok=True)

    def read(self) -> list[Line]:
        """Return all whole lines, the oldest first."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def add(self, line: Line) -> None:
        """Append a line, whole, in place of what a killed worker may have left of its own."""
        with self.path.open("a+b", buffering=0) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            stream.truncate(stream.readall().rfind(b"\n") + 1)
            stream.write((json.dumps(line) + "\n").encode())

    def claim(self, key: Line) -> TextIO | None:
        """Return a lock that is held until it is closed; None where another process has it."""
        lock = (self.shared / f"{digest_of(key)[:16]}.claim").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock


def line_of(key: Line, lines: Iterable[Line]) -> Line | None:
    """Return the line that an arm has left."""
    return next((line for line in lines if {name: line.get(name) for name in key} == key), None)


def latest(lines: list[Line]) -> list[Line]:
    """Return the lines of the newest code, profile and text."""
    return [line for line in lines if line["origin"] == lines[-1]["origin"]]


def work(lines: Lines, wanted: Callable[[list[Line]], Iterable[Line]], make: Callable[[Line], Line]) -> int:
    """Make arms until none is left that is nobody's; return how many failed.

    Args:
        lines: where they are written down.
        wanted: from the lines so far, the keys of the arms to be made, the most telling first.
        make: makes the rest of an arm's line from its key.
    """
    failed: list[Line] = []
    while True:
        for key in wanted(lines.read()):
            if key in failed or (lock := lines.claim(key)) is None:
                continue
            with lock:
                if line_of(key, lines.read()) is not None:
                    continue
                try:
                    lines.add(key | make(key))
                except (UserError, RuntimeError, ValueError, ImportError) as error:  # others are worth having
                    failed.append(key)
                    reason = str(error) if isinstance(error, UserError) else traceback.format_exc()
                    print(f"failed: {key}: {reason}", file=sys.stderr, flush=True)
            break
        else:
            return len(failed)


def parser_of(prog: str, text: str | None, lines: str) -> argparse.ArgumentParser:
    """Return a parser with what benches of arms have in common."""
    parser = argparse.ArgumentParser(prog=prog, description=text,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="smollm2-gpu")
    parser.add_argument("--root", type=Path, default=ROOT, help="where vendor/, build/ and profiles/ are")
    parser.add_argument("--lines", type=Path, default=ROOT / "build" / lines, help="one line an arm")
    parser.add_argument("--seconds", type=float, default=1500, help="for everything (1500); 0 only reports")
    parser.add_argument("--cores", help=argparse.SUPPRESS)  # a worker's, as is the next
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


def run_workers(module: str, argv: list[str], seconds: float) -> int:
    """Have a worker on each GPU make arms for so many seconds, 0 for none; return how many workers failed."""
    argv = [*argv, "--until", str(time.time() + seconds)]
    workers = _start(module, argv) if seconds else []
    return sum(worker.wait() != 0 for worker in workers)


def _start(module: str, argv: list[str]) -> "list[subprocess.Popen[bytes]]":
    """Start one worker on each GPU that is to be seen, or a single one, each with its share of the cores."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = named or [str(number) for number in range(torch.cuda.device_count())] or [""]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(devices))
    started = []
    for number, device in enumerate(devices):
        own = {"CUDA_VISIBLE_DEVICES": device, "OMP_NUM_THREADS": str(share)}
        bound = ",".join(map(str, cores[number * share : (number + 1) * share] or cores))
        command = [sys.executable, "-m", module, *argv, "--cores", bound]
        started.append(subprocess.Popen(command, env=os.environ | compiler_caches(ROOT) | own))
    return started
