"""What a stage in a container may not do, in words: reach a network, write outside its folders."""

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stages.job import Job
from stages.wrapper.redaction import hide_secrets

ASKING = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getaddrinfo": 0,
          "socket.gethostbyname": 0, "socket.gethostbyaddr": 0, "socket.getnameinfo": 0}
OWN_NAMES = ("", "localhost", "localhost.localdomain", "ip6-localhost")
REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM)


def watch_network(job: Job) -> None:
    """End this process, with the address, as soon as Python code in it asks for a machine that it may not.

    A container without a network would refuse anyway, but with an error that names no address and that a
    library may swallow; what is not Python meets the bare refusal. A stage that may reach declared servers
    has the host's network: for it this is all that keeps Python code from others, this machine's included.
    """
    declared = _declared(job.reach)
    allowed = f"this stage may reach {', '.join(job.reach)}" if job.reach else "only fetch may meet a network"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ASKING and (address := _asked(arguments[ASKING[event]], arguments)):
            if declared(address) if job.reach else _is_own(address):
                return
            sentence = f"tried to reach {':'.join(filter(None, address))}; {allowed}"
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


def _asked(address: Any, arguments: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return host and port (empty where none is told) that are asked for, None for a path or no address."""
    if address is None:
        return None  # sendmsg over a connection, which was asked for before
    if isinstance(address, str | bytes) and len(arguments) > 1 and isinstance(arguments[0], socket.socket):
        return None  # a socket of this machine
    host, port = (address[0], address[1]) if isinstance(address, tuple) else (address, None)
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "")
    if port is None and len(arguments) > 1 and isinstance(arguments[1], str | int):
        port = arguments[1]  # getaddrinfo(host, port, ...)
    return name, str(port or "")


def _is_own(address: tuple[str, str]) -> bool:
    name, _ = address
    return name in OWN_NAMES or name == socket.gethostname() or _is_loopback(name)


def _declared(reach: tuple[str, ...]) -> Callable[[tuple[str, str]], bool]:
    """Return what says whether a host and port are of `reach`, by name or by what a name stands for."""
    servers = {(str(url.hostname), str(url.port)) for url in map(urlsplit, reach)}

    def is_declared(address: tuple[str, str]) -> bool:
        host, port = address
        if address in servers or (not port and host in {name for name, _ in servers}):
            return True
        # Asked anew each time: a name may come to stand for another machine.
        names = [name for name, number in servers if number == port]
        return any(host == found[4][0] for name in names for found in socket.getaddrinfo(name, int(port)))

    return is_declared


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
