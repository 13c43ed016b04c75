"""Ranks: processes that do a stage's tasks side by side, each on a GPU of its own.

They talk to each other through nothing but locks on files of the work folder. A task is its who holds the
lock on its claim, and the kernel lifts the locks of a process that dies: so no rank idles while there is a
task, and what a killed one had begun is done by those that live. torchrun's own agent would end or restart
all of them with it.
"""

import fcntl
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from stages.errors import UserError
from stages.job import Job
from stages.wrapper.lifeline import die_with
from stages.wrapper.voice import need_no_listener

VARIABLE = "NPROC"


def ranks_asked(job: Job) -> int:
    """Return how many ranks the variable NPROC asks for: one where it is not set.

    A stage that reaches servers is one process: that keeps them busy, and its ways to a network are watched.

    Raises:
        UserError: it is no number from 1 on, or there are fewer GPUs.
    """
    text = os.environ.get(VARIABLE) or "1"
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UserError(f"{VARIABLE} takes a number of processes, 1 or more (found {text!r})")
    count = 1 if job.reach else int(text)
    if job.device == "cuda" and count > (found := torch.cuda.device_count()):
        raise UserError(f"{VARIABLE}={count} needs as many GPUs, and {found} can be used here; look at "
                        f"nvidia-smi and CUDA_VISIBLE_DEVICES, or say {VARIABLE}={found}")
    return count


def claimed(folder: Path, names: Sequence[str], finished: Callable[[str], bool]) -> Iterator[str]:
    """Yield the tasks that fall to this process, one after the other, until all are finished by someone.

    First those that nobody is at; then it waits for the others at theirs, and gets what a dead one left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for how in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX):
        for name in names:
            if finished(name):
                continue
            with (folder / name).open("w") as claim:
                try:
                    fcntl.flock(claim, how)
                except BlockingIOError:
                    continue
                if not finished(name):
                    yield name


class Ranks[Answer]:
    """Ranks at work: entered, they start; left, none is alive.

    Args:
        job: the stage's job, for each of them.
        count: how many.
        work: what each does.

    Attributes:
        answers: what those that came to their end have returned (never None), by rank.
        faults: what went wrong with the others.
    """

    def __init__(self, job: Job, count: int, work: Callable[[Job], Answer]) -> None:
        self.job, self.count, self.work = job, count, work
        self.answers: dict[int, Answer] = {}
        self.faults: dict[int, Exception] = {}
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}

    def __enter__(self) -> Self:
        """Start them."""
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        for rank in range(self.count):
            here, there = context.Pipe(duplex=False)
            given = (os.getpid(), there, self.job, rank, self.work)
            process = context.Process(target=_run, args=given, daemon=True)
            process.start()
            there.close()
            self._running[here] = (rank, process)
            self.job.event("rank", rank=rank, pid=process.pid)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """End those that still run."""
        for _, process in self._running.values():
            process.kill()
            process.join()

    def alive(self, timeout_s: float) -> bool:
        """Wait until a rank has ended, at most so long; say whether one is still at work."""
        ready = wait(list(self._running), timeout_s)
        for channel in [channel for channel in self._running if channel in ready]:
            rank, process = self._running.pop(channel)
            answer, reason = _last_words(channel)
            process.join()
            if answer is not None:
                self.answers[rank] = answer
                continue
            self.faults[rank] = reason or UserError(
                f"rank {rank} was ended from outside (exit code {process.exitcode}); the same command goes "
                "on from where it was")
            if self._running and not isinstance(reason, UserError):  # which the others meet too
                self.job.say(f"{self.faults[rank]}; the others do what it has not")
        return bool(self._running)


def _run[Answer](parent: int, channel: Connection, job: Job, rank: int,
                 work: Callable[[Job], Answer]) -> None:
    """Be a rank: do the work, and send what it returns or why it failed."""
    die_with(parent)
    need_no_listener()
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    answer: Answer | None = None
    fault: Exception | None = None
    try:
        answer = work(job)
    except UserError as error:
        fault = error
    except Exception as error:
        job.event("failed", rank=rank, error=repr(error), traceback=traceback.format_exc())
        fault = RuntimeError(f"rank {rank}: {error!r}")
    channel.send((answer, fault))


def _last_words(channel: Connection) -> tuple[Any, Exception | None]:
    try:
        answer, fault = channel.recv()
    except EOFError:
        return None, None
    return answer, fault
