"""A voice that nobody need hear: work goes on when its terminal, or whoever read its pipe, is gone."""

import sys
from contextlib import suppress
from typing import Any, TextIO


class Voice:
    """A text stream on which a write or flush that fails is passed over; else it is the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what can be passed on."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the stream has."""
        return getattr(self._stream, name)


def need_no_listener() -> None:
    """Let this process go on when nobody takes what it says; its log is a file."""
    sys.stdout, sys.stderr = Voice(sys.stdout), Voice(sys.stderr)
