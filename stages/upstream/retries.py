"""Answers after which it is worth asking again, and when."""

import time
from email.utils import parsedate_to_datetime

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


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
