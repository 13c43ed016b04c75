"""The definition of a stage's run: everything that its outputs are a function of, and nothing else."""

import fnmatch
import importlib.metadata
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import digest_of
from stages.profile import Profile
from stages.wrapper.code import code_digests, syntax_digest
from stages.wrapper.declaration import Declaration, fill, values_at
from stages.wrapper.digests import Digests
from stages.wrapper.record import read_record, subjects

SHOWN_CHANGES = 3
SHOWN_CHARACTERS = 40
ABSENT = object()


class NotReadyError(UserError):
    """An input that an upstream stage has yet to leave, or a library that is not installed."""


def define(root: Path, profile: Profile, declaration: Declaration, digests: Digests) -> dict[str, Any]:
    """Return the definition; its key is the sha256 of its canonical JSON (`files.digest_of`).

    Image, runner, driver, host and times are no part of it.

    Raises:
        NotReadyError: an upstream stage has no record yet, or a library is missing.
        UserError: the declaration and the profile or repository do not fit together.
    """
    config = config_of(profile, declaration)
    plugins = {f"{package}.{value}" for path, package in declaration.plugins
               for value in values_at(config, path)}
    tables = {name: value for name, value in config.items() if isinstance(value, dict)}
    return {
        "stage": declaration.stage,
        "config": config,
        "seed": profile.seed,
        "device": profile.device,
        "dtype": {name: table["dtype"] for name, table in tables.items() if "dtype" in table},
        "libraries": _libraries(declaration, config),
        "code": code_digests(root, [f"stages.{declaration.stage}", *sorted(plugins)]),
        "inputs": taken_subjects(root, profile.name, declaration, config),
        "files": dict(_files(root, declaration, config, digests)),
    }


def _meaning(path: Path, digests: Digests) -> str:
    """Digest a file without its comments: Python by its syntax tree, TOML by its values, others by bytes."""
    if path.suffix == ".py":
        return syntax_digest(path)
    return _values_digest(_tables(path)) if path.suffix == ".toml" else digests.of(path)


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from error


def _values_digest(values: Any) -> str:
    return digest_of(json.loads(json.dumps(values, default=str)))


def config_of(profile: Profile, declaration: Declaration) -> dict[str, Any]:
    """Return the sections that the stage declares, as JSON values.

    Raises:
        UserError: the profile has no such section.
    """
    unknown = [name for name in declaration.sections if name not in Profile.model_fields]
    if unknown:
        raise UserError(f"stages/{declaration.stage}.py: SECTIONS names {', '.join(unknown)}; "
                        f"a profile has {', '.join(Profile.model_fields)}")
    return profile.model_dump(mode="json", include=set(declaration.sections))


def taken_subjects(root: Path, profile: str, declaration: Declaration,
                   config: dict[str, Any]) -> dict[str, str]:
    """Return 'stage/subject' -> sha256 for everything that TAKES selects, from the upstream records.

    Raises:
        NotReadyError: an upstream stage has no record yet.
        UserError: a pattern selects nothing.
    """
    taken: dict[str, str] = {}
    for pattern in declaration.takes:
        for filled in fill(pattern, config):
            stage, _, glob = filled.partition("/")
            record = read_record(root, profile, stage)
            if record is None:
                raise NotReadyError(f"it takes what {stage} leaves, and {stage} has not run: make {stage}")
            chosen = {name: digest for name, digest in subjects(record).items()
                      if fnmatch.fnmatchcase(name, glob or "*")}
            if not chosen:
                raise UserError(f"{declaration.stage}: takes {filled}, but {stage} left nothing of that name")
            taken |= {f"{stage}/{name}": digest for name, digest in chosen.items()}
    return taken


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say which parts of a definition changed, in a few words."""
    found = list(_changes(old, new, ""))
    more = f" and {len(found) - SHOWN_CHANGES} more" if len(found) > SHOWN_CHANGES else ""
    return ", ".join(found[:SHOWN_CHANGES]) + more


def _changes(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    if not isinstance(old, dict) or not isinstance(new, dict):
        yield f"{path} {_change(old, new)}"
        return
    for name in sorted({*old, *new}):
        # File and module names hold dots of their own; they stand behind a space.
        joint = " " if path in {"code", "inputs", "files"} else "."
        inner = f"{path}{joint}{name}" if path else name
        yield from _changes(old.get(name, ABSENT), new.get(name, ABSENT), inner)


def _change(old: Any, new: Any) -> str:
    if old is ABSENT or new is ABSENT:
        return "is new" if old is ABSENT else "is gone"
    texts = f"{old!r}", f"{new!r}"
    short = max(map(len, texts)) <= SHOWN_CHARACTERS
    return f"changed ({texts[0]} -> {texts[1]})" if short else "changed"


def _libraries(declaration: Declaration, config: dict[str, Any]) -> dict[str, str]:
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in (filled for pattern in declaration.libraries for filled in fill(pattern, config)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise NotReadyError(f"it needs {name}, which is not installed here: make install") from error
    return versions


def _files(root: Path, declaration: Declaration, config: dict[str, Any],
           digests: Digests) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each file, or table of a file, that the stage reads."""
    for pattern in declaration.files:
        for filled in fill(pattern, config):
            names, _, table = filled.partition("#")
            found = [path for path in root.glob(names) if path.is_file() and "__pycache__" not in path.parts]
            if not found:
                raise UserError(f"{declaration.stage}: reads {names}, and there is no such file here")
            for path in sorted(found):
                name = path.relative_to(root).as_posix()
                if not table:
                    yield name, _meaning(path, digests)
                elif table in (tables := _tables(path)):
                    yield f"{name}#{table}", _values_digest(tables[table])
                else:
                    raise UserError(f"{declaration.stage}: reads [{table}] of {name}, which it has not")
