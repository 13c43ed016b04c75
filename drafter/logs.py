"""Logs: one line of JSON an event, on stderr."""

import faulthandler
import json
import logging
import os
import stat
import sys
import time
from contextlib import suppress
from typing import Any

LOGGER = logging.getLogger("drafter")
STDERR = 2


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.name != LOGGER.name:
            line["logger"] = record.name
        if record.exc_info and record.exc_info[1]:
            line["error"] = described(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str) -> None:
    """Send events from `level` on, other libraries' warnings, and the trace of a crash to stderr."""
    unblock()
    faulthandler.enable(STDERR)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    LOGGER.setLevel(level.upper())


def unblock() -> None:
    """Let no writer wait for stderr: what a full pipe cannot take, as nobody reads it, is lost.

    The pipe is opened once more, since whoever started this process shares the way in which it is open now.
    A file never makes one wait, and must not be opened again: two would write over each other.
    """
    with suppress(OSError):  # a socket cannot be opened; one to a journal is read
        if not stat.S_ISREG(os.fstat(STDERR).st_mode):
            own = os.open(f"/proc/self/fd/{STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(own, STDERR)
            os.close(own)


def tell(sentence: str) -> None:
    """Tell the user; nothing ends because nobody reads it."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def event(level: int, name: str, **fields: object) -> None:
    """Log one event with its fields."""
    LOGGER.log(level, name, extra={"fields": fields})


def described(error: BaseException) -> str:
    """Name an exception, the start of its text, and where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} in {code.co_name})"
    return f"{type(error).__name__}: {str(error)[:200]}{place}"
