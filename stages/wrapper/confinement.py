"""What a stage in a container may not do, in words: reach a network, write outside its folders."""

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.job import Job
from stages.wrapper.redaction import hide_secrets

ASKING = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
OWN_NAMES = ("", "localhost", "localhost.localdomain", "ip6-localhost")
REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM)


def watch_network(job: Job) -> None:
    """End this process, with the address, as soon as Python code in it asks for another machine.

    The container has no network, so the attempt would fail anyway, but with an error that names no address
    and that a library may swallow. What is not Python meets the bare refusal.
    """
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ASKING and (address := _elsewhere(arguments[ASKING[event]], arguments)):
            sentence = f"tried to reach {address}; only fetch may meet a network"
            job.event("refused", reason=sentence)
            print(hide_secrets(f"draftmill: {job.stage}: {sentence}"), file=sys.stderr, flush=True)
            os._exit(2)

    sys.addaudithook(hook)


def breach(error: BaseException, job: Job, writes: list[str]) -> str:
    """Return the sentence for an error that comes of writing where a stage may not; nothing for any other."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno in REFUSALS and one.filename is not None:
            path = Path(os.fsdecode(one.filename)).absolute()
            if not any(path.is_relative_to(folder) for folder in writes):
                own = job.out.relative_to(job.root) if job.out.is_relative_to(job.root) else job.out
                return f"tried to write {path}, outside its folder {own} ({one.strerror})"
    return ""


def _elsewhere(address: Any, arguments: tuple[Any, ...]) -> str:
    """Return 'host:port' for an address on another machine, nothing for one on this."""
    if isinstance(address, str | bytes) and len(arguments) > 1 and isinstance(arguments[0], socket.socket):
        return ""  # a path: a socket of this machine
    host, port = (address[0], address[1]) if isinstance(address, tuple) else (address, None)
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "")
    if port is None and len(arguments) > 1 and isinstance(arguments[1], str | int):
        port = arguments[1]  # getaddrinfo(host, port, ...)
    if name in OWN_NAMES or name == socket.gethostname() or _is_loopback(name):
        return ""
    return name if port in (None, 0, "") else f"{name}:{port}"


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
