"""Wheels from the package index, by pip: hashed, for the grader's platform, whatever machine this is."""

import contextlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Self

from tqdm import tqdm

from stages.errors import UserError
from stages.upstream.downloads import Downloads
from stages.upstream.grader import pip_target
from stages.upstream.pip import pip_environment, reason, run_pip

ATTEMPTS = 3


class _Growth:
    """A progress bar over the bytes of the wheels in a folder; pip's own would name the index."""

    def __init__(self, folder: Path, size: int | None) -> None:
        self._folder = folder
        self._bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"fetch: {folder.name}", mininterval=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        self._bar.close()

    def show(self) -> None:
        """Bring the bar up to date."""
        total = 0
        for path in self._folder.rglob("*.whl"):
            with contextlib.suppress(FileNotFoundError):  # pip has just moved it
                total += path.stat().st_size
        self._bar.update(total - self._bar.n)


def pip_download(
    log: Downloads, lines: list[str], folder: Path, size: int | None, wanted: dict[str, str]
) -> None:
    """Bring hashed wheels for the grader's platform into a folder.

    Args:
        log: told of every attempt that fails.
        lines: hashed requirements, as in a lock.
        folder: where the wheels go; also pip's temporary files, so that their growth can be shown.
        size: bytes to come, if known.
        wanted: URI and revision of each requirement, for the log.

    Raises:
        UserError: a requirement without a fitting wheel, a wheel with another sha256, or no way to the index.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    arguments = [
        "pip",
        "download",
        "--progress-bar=off",
        "--no-deps",
        "--require-hashes",
        *pip_target(),
        f"--dest={folder}",
        f"--requirement={requirements}",
    ]
    for attempt in range(1, ATTEMPTS + 1):
        with _Growth(folder, size) as growth:
            done = run_pip(arguments, pip_environment() | {"TMPDIR": str(temporary)}, watch=growth.show)
        if done.returncode == 0:
            break
        text, final = _fault(done)
        for uri, revision in wanted.items():
            log.failed(uri, revision, text)
        if final or attempt == ATTEMPTS:
            raise UserError(text)
    shutil.rmtree(temporary, ignore_errors=True)
    requirements.unlink()


def _fault(done: subprocess.CompletedProcess[str]) -> tuple[str, bool]:
    """Return what pip's failure means, and whether trying again is useless."""
    lost = re.search(
        r"connection error|connection broken|timed out|ssl certificate", done.stdout + done.stderr
    )
    if found := re.search(r"No matching distribution found for (\S+)", done.stderr):
        if lost:
            return "the package index cannot be reached; run the same command again later", False
        return (
            f"{found[1]} has no wheel for Python 3.12 on Linux x86-64 (manylinux up to glibc 2.39), and a "
            "source archive is not taken; pin a version that has one"
        ), True
    if "DO NOT MATCH THE HASHES" in done.stderr:
        named = re.search(r"^\s*(\S+==\S+)[^\n]*:\s*\n\s*Expected", done.stderr, re.MULTILINE)
        return (
            f"{named[1] if named else 'a wheel'} as the index gives it has another sha256 than is pinned",
            True,
        )
    return f"pip could not bring the wheels: {reason(done)}", False
