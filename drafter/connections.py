"""How many connections there may be: so many that no client misses one, few enough to have files for all."""

import logging
import resource
import time
from typing import Any

from sanic.http import Stage
from sanic.server.protocols.http_protocol import HttpProtocol

from drafter import logs

BACKLOG = 256  # that may come at once, or wait while no server listens: as many as requests in flight
MOST = 4096
FEW = 64  # twice what the contract asks for at once
OTHER_FILES = 600  # of the process, and twice the backlog: one too many is closed a moment after it came


def bound() -> int:
    """Let this process open as many files as it needs and may; return for how many connections they do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = MOST + OTHER_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST + OTHER_FILES)), hard))
    found = max(1, min(MOST, hard - OTHER_FILES))
    if found < FEW:
        logs.event(logging.WARNING, "few connections", most=found,
                   reason=f"this process may open {hard} files; allow it {FEW + OTHER_FILES} (ulimit -n)")
    return found


class Connection(HttpProtocol):
    """A connection. One too many takes the place of whichever has been silent longest.

    Those whose request is being handled are not touched; where there are no others, the new one is closed.
    """

    __slots__ = ()

    def connection_made(self, transport: Any) -> None:
        """Be open, and make room."""
        super().connection_made(transport)  # type: ignore[no-untyped-call]
        self._time = time.monotonic()  # or it would be taken for the longest silent before it is first read
        if len(self.connections) > self.app.config.MOST_CONNECTIONS:
            waiting = [one for one in self.connections if one is not self and _waits(one)]
            longest: Any = min(waiting, key=_last_heard, default=self)
            longest.transport.abort()


def _waits(connection: Any) -> bool:
    http = connection.http
    open_still = connection.transport is not None and not connection.transport.is_closing()
    return open_still and (http is None or http.stage in (Stage.IDLE, Stage.REQUEST))


def _last_heard(connection: Any) -> float:
    return float(connection._time)
