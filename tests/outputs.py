"""Whole output folders with a tiny drafter, and serve.sh started from them, for the tests."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from serving import ROOT, environment, started, write_model

from drafter.server import START_S

INFO = "draftmill_probe-1.0.dist-info"
WHEEL = "draftmill_probe-1.0-py3-none-any.whl"
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


def write_output(folder: Path) -> Path:
    """Write a whole output folder: model, code, serve.sh, and a wheelhouse of one wheel."""
    write_model(folder)
    shutil.copy(ROOT / "serve.sh", folder)
    shutil.copytree(ROOT / "drafter", folder / "drafter", ignore=shutil.ignore_patterns("__pycache__"))
    write_wheelhouse(folder / "wheels")
    return folder


def write_wheelhouse(folder: Path) -> None:
    """Write one wheel that holds one module, and the hashed list of it."""
    folder.mkdir()
    files = {
        "draftmill_probe.py": b"ANSWER = 42\n",
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: draftmill-probe\nVersion: 1.0\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={urlsafe(content)},{len(content)}\n" for name, content in files.items()]
    record = f"{INFO}/RECORD"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(rows) + f"{record},,\n")
    digest = hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()
    (folder / "requirements.txt").write_text(f"draftmill-probe==1.0 --hash=sha256:{digest}\n")


def urlsafe(content: bytes) -> str:
    """The digest as a wheel's RECORD gives it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def edit(path: Path, old: str, new: str) -> None:
    """Replace what stands in a file once."""
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def served(script: Path, log: Path, *arguments: str, **env: str):
    """Run serve.sh until the block ends."""
    settings = {"PATH": PATH, "HOST": "127.0.0.1", **env}
    return started(["bash", str(script), *arguments], log, cwd=Path("/"), **settings)


def ended(script: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a serve.sh that is expected to end by itself."""
    settings = environment(**{"PATH": PATH, "HOST": "127.0.0.1", **env})
    return subprocess.run(["bash", str(script)], cwd="/", env=settings, capture_output=True, text=True,
                          timeout=START_S, check=False)  # fmt: skip


def child(server) -> int:
    """The process id of the server that serve.sh runs now; 0 for none."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else 0


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
