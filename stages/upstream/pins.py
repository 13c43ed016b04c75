"""Locks as pip-compile writes them: read into pins."""

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from stages.errors import UserError

HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)")


@dataclass(frozen=True)
class Pin:
    """One distribution at one version.

    Attributes:
        name: canonical name.
        version: the version after `==`.
        hashes: sha256 of every file that may stand for it.
    """

    name: str
    version: str
    hashes: frozenset[str]


def read_pins(path: Path) -> dict[str, Pin]:
    """Read a hashed lock; keys are canonical names.

    Raises:
        UserError: no such file, a requirement that is no `name==version` with at least one sha256, one
            pinned twice, or pip-compile's block of unpinned packages; the text names file and requirement.
    """
    if not path.is_file():
        raise UserError(f"{path.name}: there is no such lock; run `make lock`")
    text = path.read_text(encoding="utf-8")
    if "# WARNING" in text:
        raise UserError(f"{path.name}: pip-compile left packages unpinned (see its WARNING); run `make lock`")
    pins: dict[str, Pin] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        content = line.split("#", 1)[0].strip()
        if content:
            pin = _pin(path.name, content)
            if pin.name in pins:
                raise UserError(f"{path.name}: {pin.name} is pinned twice; run `make lock`")
            pins[pin.name] = pin
    return pins


def read_inputs(path: Path) -> list[Requirement]:
    """Read a `.in` file: its requirements, those of the files that it includes with `-r` first.

    Raises:
        UserError: a line that is neither a requirement nor `-r FILE`; the text names file and line.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        content = line.split("#", 1)[0].strip()
        if content.startswith("-r "):
            found += read_inputs(path.parent / content.removeprefix("-r ").strip())
        elif content:
            try:
                found.append(Requirement(content))
            except InvalidRequirement as error:
                raise UserError(f"{path.name}, line {number}: {content!r} is no requirement") from error
    return found


def _pin(file: str, content: str) -> Pin:
    specification = content.split("--hash", 1)[0].strip()
    try:
        requirement = Requirement(specification)
    except InvalidRequirement as error:
        raise UserError(f"{file}: {specification!r} is no pinned requirement; run `make lock`") from error
    clauses = list(requirement.specifier)
    hashes = frozenset(HASH.findall(content))
    exact = len(clauses) == 1 and clauses[0].operator == "==" and not clauses[0].version.endswith(".*")
    if not exact or requirement.extras or requirement.url:
        raise UserError(f"{file}: {specification!r} is not pinned by name==version; run `make lock`")
    if not hashes:
        raise UserError(f"{file}: {specification} has no sha256; run `make lock`")
    return Pin(canonicalize_name(requirement.name), clauses[0].version, hashes)
