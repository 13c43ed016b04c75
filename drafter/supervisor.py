"""The process around the server: what serve.sh becomes. It holds the port and starts the server again.

Usage: python -m drafter.supervisor --weights FOLDER

The port outlives the server: who connects while a new one starts waits for it, and is not refused. A signal
goes on to the server, and the server does not outlive this process, however it ends. After a first start that
fails, or two failures in a row later on, the next server does without kernels and graphs, lest the fault be
theirs. Environment and exit codes are the server's, but once one has been up, its 2 is a fault like others: a
file may be gone for a moment. 1 is also for a server that never came up, or had to be killed.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from drafter import logs
from drafter.listener import bind, listens
from drafter.settings import PLAIN, Address

FIRST_TRIES = 5  # of a server that has not come up once
STEADY_S = 300.0  # a server that lived this long, more than a start may take, begins a new count of failures
LONGEST_PAUSE_S = 15
STOP_S = 9.5  # to go down in, after a signal
TOLD = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Keep a server running until told to stop; see the module's head for the exit codes."""
    logs.unblock()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some parents leave it, it would never come
    signal.pthread_sigmask(signal.SIG_BLOCK, (*TOLD, signal.SIGCHLD))  # each is waited for, none interrupts
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        listener = bind(Address.from_environment(os.environ))
    except ValueError as error:
        logs.tell(f"drafter: {error}")
        return 2
    command = [sys.executable, "-m", "drafter.server", *arguments, "--listener", str(listener.fileno())]
    return Supervisor(command, listener).run()


class Supervisor:
    """Starts a server as often as needed.

    Args:
        command: the server's; it finds the listener open under the same number.
        listener: the bound socket.
    """

    def __init__(self, command: list[str], listener: socket.socket) -> None:
        self.command, self.listener = command, listener
        self.told = False

    def run(self) -> int:
        """Return the exit code once the server has stopped for good."""
        failures, plain = 0, False
        while True:
            since = time.monotonic()
            try:
                code = self._serve(plain)
            except OSError as error:  # no memory or no process to be had just now
                say(f"the server cannot be started: {error}")
                code = 1
            if self.told:
                return code
            been_up = listens(self.listener)
            if code in (0, 2) and not been_up:  # it has said how it is used, or what must be mended
                return code
            failures = 1 if time.monotonic() - since >= STEADY_S else failures + 1
            if failures >= FIRST_TRIES and not been_up:
                say(f"the server failed {failures} times in a row, the last time with code {code}; "
                    "its log says why")  # fmt: skip
                return 1
            plain = code not in (0, 2) and failures >= 1 + been_up
            pause_s = 0 if failures == 1 else min(2 ** (failures - 2), LONGEST_PAUSE_S)
            how = ", without kernels and graphs" if plain else ""
            say(f"the server ended with code {code}; starting it again in {pause_s} s{how}")
            if signal.sigtimedwait(TOLD, pause_s) is not None:
                return 0

    def _serve(self, plain: bool) -> int:
        """Run one server to its end, and return its exit code, negative for a signal's number."""
        server = subprocess.Popen(
            self.command, pass_fds=[self.listener.fileno()], env=os.environ | ({PLAIN: "1"} if plain else {}),
            preexec_fn=_tied_to(os.getpid()),  # noqa: PLW1509 - there is one thread only
        )
        while True:
            number = signal.sigwait((*TOLD, signal.SIGCHLD))
            if number in TOLD:
                return self._stop(server)
            if (code := server.poll()) is not None:
                return code

    def _stop(self, server: subprocess.Popen[bytes]) -> int:
        self.told = True
        self.listener.close()  # or new connections would still be taken
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            say(f"the server did not go down within {STOP_S} s")
            return 1
        return 0  # whatever its code: a fault may have ended it at the same moment


def _tied_to(parent: int) -> Callable[[], None]:
    """Return what a child does first: hear signals again, and die with its parent."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: its parent passes it on
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def say(sentence: str) -> None:
    """Tell the user, in serve.sh's name: this process is what it became."""
    logs.tell(f"serve.sh: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
