"""Run a command with less: without a network, as another user, or without capabilities.

Usage: python -I isolation.py [--no-network] [--user UID | --no-capabilities] -- COMMAND [ARGUMENT ...]

A program of its own, of the standard library only: a user namespace can be entered only by a process with one
thread, and user and capabilities must go between the fork and the exec. The command dies with its parent.
Where the system refuses to take the network away the command runs all the same and finds the reason in
DRAFTMILL_NETWORK (`none` where it worked); user and capabilities are not negotiable: exit code 126.
"""

import argparse
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from pathlib import Path

NETWORK = "DRAFTMILL_NETWORK"
REFUSED = 126

# From linux/prctl.h, linux/capability.h and linux/sockios.h.
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def command(*options: str, command: list[str]) -> list[str]:
    """Return the command line that runs a command under these options."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), *options, "--", *command]


def leave_network() -> str:
    """Move to a network with nothing but a loopback; return 'none' or why the network is still open."""
    # A child tries it first: half a namespace (no loopback, no user) would be worse than none.
    child = os.fork()
    if not child:
        try:
            _enter_namespace()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        return f"open: {os.strerror(abs(number))}"
    _enter_namespace()
    return "none"


def _enter_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    try:
        os.unshare(os.CLONE_NEWNET)
    except PermissionError:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _raise_loopback()


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        name, flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | IFF_UP))


def become(uid: int) -> None:
    """Become a user and the group of the same number, with no other group and no way back."""
    if os.getuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability, for what is executed later too.

    Raises:
        OSError: the system keeps one.
    """
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(last + 1):
        try:
            _prctl(PR_CAPBSET_DROP, capability)
        except PermissionError:
            break  # it takes a capability to lay them down: one who has none cannot, and need not
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _checked(_libc().capset(header, bytes(24)))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _checked(_libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _checked(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(argv: list[str] | None = None) -> int:
    """Lay down what was asked, and become the command; return only where that failed."""
    parser = argparse.ArgumentParser(description="Run a command with less.")
    parser.add_argument("--no-network", action="store_true")
    parser.add_argument("--user", type=int)
    parser.add_argument("--no-capabilities", action="store_true")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    try:
        if arguments.no_network:
            os.environ[NETWORK] = leave_network()
        if arguments.user is not None:
            become(arguments.user)
        if arguments.no_capabilities:
            drop_capabilities()
        # Last: a change of user clears it.
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        os.execvp(arguments.command[0], arguments.command)  # noqa: S606  becoming the command is the point
    except OSError as error:
        print(f"isolation: {arguments.command[0]}: {error}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
