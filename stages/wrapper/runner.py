"""The seam at which a stage leaves this process: a call, and the runner that carries it out right here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from stages.wrapper.redaction import network_environment, server_environment

PASSED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TERM", "COLUMNS", "LD_LIBRARY_PATH", "CUDA_HOME",
          "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NPROC")
CACHE = Path("build/.cache")
FIXED = {
    # libgomp's spinning threads starve each other as soon as anything else is busy.
    "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0",
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
    "TZ": "UTC", "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": "315532800",  # 1980-01-01, the first day of zip
    "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
WORKER = ("-m", "stages.wrapper.worker")
ASKED_AGAIN_S = 2.0  # what a whole process group is sent comes twice at once: make passes its own on


@dataclass(frozen=True)
class Call:
    """What a stage's process is given, in terms that a container can honour as well.

    Attributes:
        stage: whose call it is.
        spec: the file that says what the worker is to do.
        env: the whole environment.
        root: the repository, the working folder.
        reads: what it reads beside the repository's code.
        writes: paths that it writes.
        network: whether it may meet a network.
        reach: addresses of servers that it may reach, and no other machine.
        devices: how many GPUs it needs.
        conducts: whether it starts containers itself, and so stays outside of one.
    """

    stage: str
    spec: Path
    env: Mapping[str, str]
    root: Path
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    network: bool
    devices: int
    reach: tuple[str, ...] = ()
    conducts: bool = False


class Runner(Protocol):
    """Carries out calls: on this machine, or in containers."""

    @property
    def name(self) -> str:
        """What RUNNER calls it."""

    def run(self, call: Call) -> int:
        """Execute a call, pass on to it what asks it to stop, and return its exit code."""

    def facts(self) -> dict[str, Any]:
        """Return what a record says of where the stage ran, beside the runner's name."""


@dataclass(frozen=True)
class Host:
    """This machine, in the virtual environment that was installed from the hashed lock."""

    name: str = "host"

    def run(self, call: Call) -> int:
        """Execute a call with the interpreter that runs now, in a session of its own."""
        command = [sys.executable, *WORKER, str(call.spec), "--parent", str(os.getpid())]
        env = dict(call.env)
        if self.name == "system" and (path := os.environ.get("PYTHONPATH")):
            env["PYTHONPATH"] = path  # where a borrowed machine may keep the libraries that it has
        child = subprocess.Popen(command, env=env, cwd=call.root, start_new_session=True)
        return see_to_its_end(child, child.kill)

    def facts(self) -> dict[str, Any]:
        """Return nothing: the worker says what it saw."""
        return {}


def see_to_its_end(child: "subprocess.Popen[bytes]", kill: Callable[[], object]) -> int:
    """Wait for a process that leads a session of its own, and return its exit code.

    SIGINT and SIGTERM are passed on, and SIGHUP, where nohup has not had it ignored, as SIGTERM.
    """
    asked: list[float] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif asked[-1] - asked[0] > ASKED_AGAIN_S:  # who asks once more does not want to wait
            kill()

    stops = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stops.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in stops}
    try:
        code = child.wait()
    finally:
        _sweep(child.pid)
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def environment(root: Path, network: bool, reach: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a stage's whole environment; tokens, endpoints and proxies only where a network may be met."""
    ours = {name: os.environ[name] for name in PASSED if name in os.environ}
    ours |= FIXED | compiler_caches(root) | {
        "OMP_NUM_THREADS": str(threads()), "HF_HOME": str(root / CACHE / "huggingface")}
    ours["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ours.get('PATH', os.defpath)}"
    ours |= network_environment(os.environ) if network else OFFLINE
    return ours | (server_environment(os.environ) if reach else {})


def compiler_caches(root: Path) -> dict[str, str]:
    """Return where torch and Triton keep what they have compiled: stages and benches use it again."""
    return {"TRITON_CACHE_DIR": str(root / CACHE / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(root / CACHE / "inductor")}  # fmt: skip


def threads() -> int:
    """Return OMP_NUM_THREADS if it is set, else the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0))
    try:  # a container may see 64 cores and be given two
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def _sweep(group: int) -> None:
    """End what a stage may have started and left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
