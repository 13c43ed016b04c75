"""The socket to listen on: taken before anything slow, and kept while servers come and go."""

import errno
import socket
import time

from drafter.settings import Address

PATIENCE_S = 3.0  # for a server that was just killed and has not let go yet
PAUSE_S = 0.1


def bind(address: Address) -> socket.socket:
    """Take the port; connections are refused until somebody listens.

    Raises:
        ValueError: it is taken, not ours to take, or the host is no address of this machine.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _bound(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise no_listener(address, error) from error
            time.sleep(PAUSE_S)


def no_listener(address: Address, error: OSError) -> ValueError:
    """Return the sentence for an address that cannot be listened on."""
    return ValueError(
        f"cannot listen on {address.host} port {address.port} ({error.strerror or error}); "
        "set HOST and PORT to a free address of this machine"
    )


def listens(listener: socket.socket) -> bool:
    """Say whether any process has ever listened on this socket."""
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _bound(address: Address) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    return listener
