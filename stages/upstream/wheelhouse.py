"""Wheels: read, held to their lock and to the grader, and described in an SBOM."""

import email.parser
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from stages.errors import UserError
from stages.files import sha256_file
from stages.upstream import grader
from stages.upstream.pins import Pin


@dataclass(frozen=True)
class Wheel:
    """One wheel as it lies on disk; `requires` are its Requires-Dist lines."""

    path: Path
    name: str
    version: str
    tags: tuple[str, ...]
    sha256: str
    size: int
    licence: str | None
    requires_python: str
    requires: tuple[str, ...] = field(default=())

    @property
    def purl(self) -> str:
        """The package URL."""
        return f"pkg:pypi/{self.name}@{self.version}"


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's name and metadata.

    Raises:
        UserError: it is no wheel, is damaged, or its metadata is of another name or version than its file.
    """
    if path.suffix != ".whl" or path.is_symlink() or not path.is_file():
        raise UserError(
            f"{path.name} is not a wheel: only .whl files are taken, never source archives or links"
        )
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            inside = [
                item
                for item in archive.namelist()
                if item.endswith(".dist-info/METADATA") and item.count("/") == 1
            ]
            text = archive.read(inside[0]).decode() if len(inside) == 1 else ""
    except InvalidWheelFilename as error:
        raise UserError(f"{path.name} is not named as a wheel is: {error}") from error
    except (zipfile.BadZipFile, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path.name} is damaged ({type(error).__name__}); remove it and run `make fetch`"
        ) from error
    metadata = email.parser.Parser().parsestr(text, headersonly=True)
    if canonicalize_name(metadata.get("Name", "")) != name or metadata.get("Version", "") != str(version):
        raise UserError(f"{path.name} holds the metadata of another distribution")
    return Wheel(
        path,
        name,
        str(version),
        tuple(sorted(str(tag) for tag in tags)),
        sha256_file(path),
        path.stat().st_size,
        _licence(metadata),
        metadata.get("Requires-Python", ""),
        tuple(metadata.get_all("Requires-Dist") or ()),
    )


def runs(wheel: Wheel) -> bool:
    """Whether the grader's Python takes a wheel by its tags."""
    return any(str(tag) in wheel.tags for tag in grader.tags())


def matched(folder: Path, pins: Mapping[str, Pin]) -> list[Wheel]:
    """Return the wheels of a folder, by name, if they are exactly the pins' and run on the grader.

    Raises:
        UserError: a file that is no wheel or does not run there, a version or sha256 that the lock lacks, two
            wheels of a distribution, one too many, or one missing; the text names it.
    """
    found: dict[str, Wheel] = {}
    for path in sorted(folder.iterdir()):
        wheel = read_wheel(path)
        pin = pins.get(wheel.name)
        if pin is None:
            raise UserError(
                f"{path.name} is not in lock/serve.txt, or is not shipped; remove it from vendor/wheels/"
            )
        if wheel.version != pin.version:
            raise UserError(f"{path.name}: lock/serve.txt pins {pin.name}=={pin.version}; run `make fetch`")
        if wheel.sha256 not in pin.hashes:
            raise UserError(
                f"{path.name} has sha256 {wheel.sha256}, which lock/serve.txt does not have for "
                f"{pin.name}=={pin.version}; remove it and run `make fetch`"
            )
        if not runs(wheel):
            raise UserError(
                f"{path.name} does not run on the grader, which takes cp312, abi3 and py3 wheels for "
                f"manylinux up to glibc 2.{grader.GLIBC_MINOR} on x86-64"
            )
        if wheel.name in found:
            raise UserError(f"{path.name} and {found[wheel.name].path.name} are one distribution; remove one")
        found[wheel.name] = wheel
    if missing := sorted(set(pins) - set(found)):
        raise UserError(f"there is no wheel of {', '.join(missing)}; run `make fetch`")
    return [found[name] for name in sorted(found)]


def check_closure(wheels: list[Wheel]) -> None:
    """Check that everything that the wheels ask for is among them or certain to be with the grader.

    Raises:
        UserError: a requirement is met by neither; the text names wheel and requirement.
    """
    have = {wheel.name: wheel for wheel in wheels}
    for wheel in wheels:
        if not SpecifierSet(wheel.requires_python).contains("3.12.0"):
            raise UserError(f"{wheel.path.name} asks for Python {wheel.requires_python}; the grader has 3.12")
    for wheel, requirement in _asked(have):
        name = canonicalize_name(requirement.name)
        other = have.get(name)
        version = other.version if other else grader.PREINSTALLED.get(name)
        if version is None and name in grader.OMITTED:
            continue
        if version is None:
            raise UserError(
                f"{wheel.path.name} needs {requirement}, which is neither among the wheels nor "
                "installed at the grader; add it to lock/serve.in and run `make lock`"
            )
        if not requirement.specifier.contains(version, prereleases=True):
            whose = "the wheelhouse has" if other else "the grader is only sure to have"
            raise UserError(f"{wheel.path.name} needs {requirement}; {whose} {version}")


def sbom(wheels: list[Wheel]) -> dict[str, Any]:
    """Describe the wheels as a CycloneDX 1.6 document, a pure function of them: no time, no serial number."""
    have = {wheel.name: wheel for wheel in wheels}
    edges: dict[str, set[str]] = {wheel.name: set() for wheel in wheels}
    for wheel, requirement in _asked(have):
        name = canonicalize_name(requirement.name)
        if name in have:
            edges[wheel.name].add(have[name].purl)
    left_out = [
        {"name": f"draftmill:omitted:{name}", "value": why} for name, why in sorted(grader.OMITTED.items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "name": "draftmill-wheelhouse", "bom-ref": "wheelhouse"},
            "properties": left_out,
        },
        "components": [_component(wheel) for wheel in wheels],
        "dependencies": [
            {"ref": "wheelhouse", "dependsOn": [wheel.purl for wheel in wheels]},
            *({"ref": wheel.purl, "dependsOn": sorted(edges[wheel.name])} for wheel in wheels),
        ],
    }


def _asked(have: Mapping[str, Wheel]) -> Iterator[tuple[Wheel, Requirement]]:
    """Yield each requirement that holds on the grader, those of extras that are asked for among them."""
    waiting: list[tuple[str, str]] = [(name, "") for name in sorted(have)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop(0)
        for line in have[name].requires:
            requirement = Requirement(line)
            environment = {**grader.MARKERS, "extra": extra}
            by_extra = (
                not extra
                or not requirement.marker
                or not requirement.marker.evaluate({**grader.MARKERS, "extra": ""})
            )
            if (requirement.marker is None or requirement.marker.evaluate(environment)) and by_extra:
                yield have[name], requirement
                further = {(canonicalize_name(requirement.name), wanted) for wanted in requirement.extras}
                fresh = sorted(pair for pair in further - seen if pair[0] in have)
                seen.update(fresh)
                waiting += fresh


def _component(wheel: Wheel) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "name": wheel.name,
        "version": wheel.version,
        "purl": wheel.purl,
        "bom-ref": wheel.purl,
        "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
        "properties": [
            {"name": "draftmill:file", "value": wheel.path.name},
            {"name": "draftmill:bytes", "value": str(wheel.size)},
            {"name": "draftmill:tags", "value": json.dumps(list(wheel.tags))},
        ],
    }
    if wheel.licence:
        component["licenses"] = [{"license": {"name": wheel.licence}}]
    return component


def _licence(metadata: Any) -> str | None:
    """Return the licence that METADATA states: SPDX expression, short name, or a classifier's last part."""
    for header in ("License-Expression", "License"):
        value = str(metadata.get(header) or "").strip()
        if value and "\n" not in value and value != "UNKNOWN":
            return value
    classifiers = [
        str(line) for line in metadata.get_all("Classifier") or () if str(line).startswith("License ::")
    ]
    return classifiers[0].rsplit(" :: ", 1)[-1] if classifiers else None
