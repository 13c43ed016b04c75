"""The grader's /opt/venv out of this machine's environment: links to what the grader has, and no more.

The packages themselves, 7 GB of them, are mounted into the twin read-only. Only those that lock/grader.txt
pins are linked to, so that a wheel missing from a submission is missing in the twin as well. What the user
installs goes into the folder, as at the grader's.
"""

import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from stages.errors import UserError
from stages.upstream.pins import read_pins

AT = "/opt/venv"
PACKAGES_AT = "/opt/packages"
PYTHON_AT = "/opt/python"
# Where the base image has those that this machine's environment lacks (docker/base).
IN_IMAGE = "/opt/grader"
LOCK = "lock/grader.txt"
PIP = f"#!{AT}/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"


def mounts() -> dict[Path, str]:
    """Return what the links need behind them: folders of this machine -> where the twin sees them."""
    found = {_packages(): PACKAGES_AT}
    return found if sys.base_prefix == "/usr" else {**found, Path(sys.base_prefix): PYTHON_AT}


def variables() -> dict[str, str]:
    """Return what a Python that was moved needs: where its own library lies, if it is shared."""
    moved = sys.base_prefix != "/usr" and sysconfig.get_config_var("Py_ENABLE_SHARED")
    return {"LD_LIBRARY_PATH": f"{PYTHON_AT}/lib"} if moved else {}


def lay_out(venv: Path, root: Path) -> None:
    """Make the folder.

    Args:
        venv: where; it is to be seen at /opt/venv.
        root: the repository, for its lock.

    Raises:
        UserError: this environment has another version than the lock, or others may not read it.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = "/usr/bin" if sys.base_prefix == "/usr" else f"{PYTHON_AT}/bin"
    site = venv / "lib" / f"python{version}" / "site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    for name in ("python", "python3", f"python{version}"):
        (venv / "bin" / name).symlink_to(f"{home}/python{version}")
    for name in ("pip", "pip3"):
        (venv / "bin" / name).write_text(PIP, encoding="ascii")
        (venv / "bin" / name).chmod(0o755)
    (venv / "pyvenv.cfg").write_text(
        f"home = {home}\ninclude-system-site-packages = false\nversion = {platform.python_version()}\n")
    (site / "grader.pth").write_text(f"{IN_IMAGE}\n")
    for name in sorted(set(_entries(root))):
        (site / name).symlink_to(f"{PACKAGES_AT}/{name}")
    _check_readable(_packages() / "torch" / "__init__.py")


def _packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _entries(root: Path) -> Iterator[str]:
    """Yield the names at the top of site-packages that belong to the lock's distributions."""
    for name, pin in read_pins(root / LOCK).items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the base image has it
        if distribution.version != pin.version:
            found = distribution.version
            raise UserError(f"{LOCK} pins {name}=={pin.version}, and this environment has {found}: make lock")
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                yield file.parts[0]


def _check_readable(path: Path) -> None:
    if not os.getuid() and not path.stat().st_mode & 0o004:
        raise UserError(f"{path} is for root alone, and the grader's user is another: chmod -R go+rX .venv")
