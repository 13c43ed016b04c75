"""A polite stop: SIGTERM or Ctrl-C is noted, and acted on where nothing is half done."""

import signal
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Within it the first signal is only noted; `asked` is its number, or 0.

    A machine that is taken back sends SIGTERM and gives some seconds: enough to save.
    """

    def __init__(self) -> None:
        self.asked = 0

    def __enter__(self) -> Self:
        """Take the signals over."""
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Give them back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = number
