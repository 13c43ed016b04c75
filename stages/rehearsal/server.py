"""A submission's server as the grader starts it: `bash serve.sh` with a clean environment, asked over TCP."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from stages.rehearsal import isolation
from stages.rehearsal.client import RequestError, parse

POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0
LOG_LINES = 40
# The grader has one GPU; a machine with more says here which of them is ours.
HANDED_ON = ("CUDA_VISIBLE_DEVICES",)
# As the contract has it.
CONTRACT = {"HOST": "0.0.0.0", "PORT": "8000", "MODEL_NAME": "submission"}  # noqa: S104


class SceneError(Exception):
    """The rehearsal cannot go on; the text says why."""


class Line:
    """The way to a server.

    Args:
        port: where it listens on this network's loopback.
        ended: says how serve.sh ended, and nothing while it runs.
    """

    def __init__(self, port: int, ended: Callable[[], str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, trust_env=False)
        self.ended = ended

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Return the seconds until /health answered 200 for the first time.

        Raises:
            SceneError: serve.sh ended, or the time ran out.
        """
        start = time.monotonic()
        while (waited := time.monotonic() - start) < timeout_s:
            if how := self.ended():
                raise SceneError(f"serve.sh {how} after {waited:.1f} s")
            if self.health() == 200:
                return time.monotonic() - start
            time.sleep(POLL_S)
        raise SceneError(f"/health did not answer 200 within {timeout_s:g} s")

    def health(self) -> int | None:
        """Return the status of GET /health, or None where nobody answers."""
        try:
            return self.client.get("/health", timeout=HEALTH_TIMEOUT_S).status_code
        except httpx.HTTPError:
            return None

    def smoke(self, prompt: list[int], timeout_s: float) -> dict[str, Any]:
        """Return the draft for one prompt (or None and the reason) and the seconds it took."""
        start = time.perf_counter()
        draft, reason = None, None
        try:
            draft = parse(self.client.post("/draft", json={"tokens": prompt}, timeout=timeout_s))
        except (httpx.HTTPError, RequestError) as error:
            reason = f"{type(error).__name__}: {error}"
        return {"draft": draft, "reason": reason, "seconds": round(time.perf_counter() - start, 3)}


class Server:
    """A running server process, in a session of its own. Leaving the context kills what is left of it.

    Args:
        command: what starts it.
        log: where what it writes goes.
        environment: all that the process is given.
        kill: ends what is not of the process's own session, such as a container; called before the rest is.
    """

    def __init__(self, command: list[str], log: Path, environment: dict[str, str],
                 kill: Callable[[], object] = lambda: None) -> None:
        self.log = log
        self.kill = kill
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, env=environment, cwd="/", stdin=subprocess.DEVNULL,
                                            stdout=stream, stderr=stream, start_new_session=True)

    def __enter__(self) -> "Server":
        """Return the server: it has been started already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing running, whatever happened."""
        if self.process.poll() is None:
            self.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> str:
        """Return how serve.sh ended; nothing while it runs."""
        code = self.process.poll()
        return "" if code is None else f"ended with code {code}"

    def stop(self, timeout_s: float) -> dict[str, Any]:
        """Send SIGTERM; return the exit code (None: still running), the seconds, and how many were left."""
        ended_before = self.process.poll() is not None
        start = time.monotonic()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        while _alive(self.process.pid) and time.monotonic() - start < timeout_s:
            time.sleep(POLL_S)
        return {"code": self.process.returncode, "ended_before": ended_before,
                "left": _alive(self.process.pid), "seconds": round(time.monotonic() - start, 3)}

    def log_tail(self) -> list[str]:
        """Return the last lines that the server wrote."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]


def start_here(submission: Path, scratch: Path, isolate: list[str]) -> tuple[Server, Line]:
    """Start a submission's server on this machine, and return it with the way to it.

    Args:
        submission: the folder that holds serve.sh.
        scratch: holds the folders `home` and `tmp` for the server; its log is written here.
        isolate: options of `stages.rehearsal.isolation` under which it runs.
    """
    port = free_port()
    environment = CONTRACT | {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PORT": str(port),
        "HOME": str(scratch / "home"),
        "TMPDIR": str(scratch / "tmp"),
        "LANG": "C.UTF-8",
    } | {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    command = isolation.command(*isolate, command=["bash", str(submission / "serve.sh")])
    server = Server(command, scratch / "server.log", environment)
    return server, Line(port, server.ended)


def _alive(group: int) -> int:
    """Count the processes of a group that are not just waiting to be reaped."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, member_of = path.read_text().rpartition(")")[2].split()[:3]
            count += int(member_of) == group and state != "Z"
    return count


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
