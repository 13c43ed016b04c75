"""Answers after which it is worth asking again, and when."""

import time
from email.utils import parsedate_to_datetime

TOO_MANY = 429
FIRST_OF_SERVER = 500  # from here on the fault is the server's, or of a proxy before it: 520, 529, ...


def is_transient(status: int) -> bool:
    """Say whether an answer of this status may be another one the next time."""
    return status in (408, 425, TOO_MANY) or status >= FIRST_OF_SERVER


def retry_after_s(header: str | None) -> float | None:
    """Read a Retry-After, in seconds or as a date; anything else means that we choose."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
