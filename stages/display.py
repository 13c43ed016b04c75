"""Tables for people: as wide as the terminal, or wide enough to be read in a log."""

import sys

from rich.console import Console

LOG_WIDTH = 120


def console(stderr: bool = False) -> Console:
    """Return a console on stdout, or on stderr for what accompanies work."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
