"""The libraries whose version is not the lock's."""

import importlib.metadata
import re
from pathlib import Path

LOCK = "lock/build.txt"
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


def unlocked(root: Path) -> dict[str, list[str]]:
    """Compare what this interpreter has with the build lock: name -> [locked, found]."""
    try:
        pins = PIN.findall((root / LOCK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {LOCK: ["present", "missing"]}
    found = {name: [locked, _version(name)] for name, locked in pins}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1].partition("+")[0]}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
