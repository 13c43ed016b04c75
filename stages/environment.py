"""The virtual environment .venv, made once from the hashed locks. Needs nothing but Python's own library.

    python3.12 -m stages.environment            make it, unless it is there and answers to the locks
    python3.12 -m stages.environment --check    exit 0 if it does, else 1
    python3 -m stages.environment --system      make nothing: does this python3 have what stages take?
"""

from __future__ import annotations  # an older Python gets as far as the sentence

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import time
import venv
from pathlib import Path

from stages.errors import UserError
from stages.files import write_atomic
from stages.wrapper.place import hold

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("lock/build.txt", "lock/dev.txt")
WRAPPER_LIBRARIES = ("pydantic", "tqdm", "rich")


def main(argv: list[str] | None = None) -> int:
    """Make or check the environment; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.environment", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether it is ready")
    parser.add_argument("--system", action="store_true", help="check the Python that runs this")
    options = parser.parse_args(argv)
    try:
        if options.system:
            return check_system()
        if options.check:
            return 0 if ready(ROOT) else 1
        if not ready(ROOT):
            with hold(ROOT):
                if not ready(ROOT):  # another shell may have made it while this one waited
                    make(ROOT)
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def check_system() -> int:
    """Return 0 if this Python can run stages as it is.

    Raises:
        UserError: it is too old, or lacks a library; the text names it.
    """
    missing = [name for name in WRAPPER_LIBRARIES if importlib.util.find_spec(name) is None]
    if sys.version_info < (3, 12):  # noqa: UP036 (a borrowed machine's python3 may be anything)
        missing.insert(0, "Python 3.12")
    if missing:
        raise UserError(f"RUNNER=system takes {sys.executable} as it is, and it lacks {', '.join(missing)}; "
                        "install that, or use RUNNER=host")
    return 0


def ready(root: Path) -> bool:
    """Whether .venv was installed to the end from the locks as they are now, and still has its Python."""
    stamp, python = (root / ".venv" / name for name in ("draftmill-locks", "bin/python"))
    return python.exists() and stamp.is_file() and stamp.read_text(encoding="ascii") == _state(root)


def make(root: Path) -> None:
    """Make .venv anew and install every pin of the locks, by hash.

    The stamp is written last: a killed install has none and is begun again.

    Raises:
        UserError: a lock is missing, .venv is a link, or pip fails.
    """
    state, started = _state(root), time.monotonic()
    if (root / ".venv").is_symlink():  # what it points to is another's, and would be emptied
        raise UserError(f"{root / '.venv'} is a link to {(root / '.venv').readlink()}, which was not made "
                        "from the locks as they are now; remove the link (rm .venv), then run make again")
    print("draftmill: making .venv from the hashed locks, once (about 7 GB, a few minutes)", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(root / ".venv")
    command = [str(root / ".venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install",
               "--require-hashes", "--only-binary", ":all:"]
    for lock in LOCKS:
        command += ["--requirement", str(root / lock)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise UserError("pip could not install the locks (its words are above); then run make again")
    write_atomic(root / ".venv" / "draftmill-locks", state)
    print(f"draftmill: .venv is ready after {time.monotonic() - started:.0f} s", flush=True)


def _state(root: Path) -> str:
    digest = hashlib.sha256(str(root).encode())  # an environment cannot be moved
    for lock in LOCKS:
        try:
            digest.update((root / lock).read_bytes())
        except FileNotFoundError as error:
            raise UserError(f"{lock} is missing: git checkout {lock}") from error
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
