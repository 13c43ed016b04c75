"""Places: the lock that one process at a time holds, and folders filled beside their place and moved in."""

from __future__ import annotations  # an older Python gets as far as the sentence

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold(root: Path) -> Iterator[None]:
    """Hold the repository's lock; wait, and say so, while another process has it.

    The kernel drops the lock when its holder dies, however it dies.
    """
    path = root / "build" / ".lock"
    handle = _locked(path)
    try:
        yield
    finally:
        os.close(handle)


def _locked(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _wait(handle)
            # `clean` removes the file: a lock on a file that is gone from its place protects nobody.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _wait(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("draftmill: another draftmill process is at work in this folder; waiting for it to end",
              file=sys.stderr, flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)


def fresh_partial(place: Path) -> Path:
    """Make an empty folder beside a place, sweeping away what an earlier, killed run left there."""
    partial = _beside(place, "partial")
    for stale in (partial, _beside(place, "old")):
        remove(stale)
    partial.mkdir(parents=True)
    return partial


def move_in(partial: Path, place: Path) -> None:
    """Put a finished folder in its place.

    A kill between the renames leaves no place at all; the record is gone by then, so the stage runs again.
    """
    place, old = _real(place), _beside(place, "old")
    if place.exists():
        place.rename(old)
    partial.rename(place)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _real(place: Path) -> Path:
    return place.resolve() if place.is_symlink() else place


def _beside(place: Path, kind: str) -> Path:
    place = _real(place)
    return place.with_name(f".{place.name}.{kind}")
