"""Profiles: one TOML file per job, checked whole before any work."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from stages.errors import UserError
from stages.profile.output import Limits, Selfcheck, Serve
from stages.profile.prompts import CATEGORIES, Data, DataSource, LocalFile, Way
from stages.profile.section import Name, Section
from stages.profile.target import Fetch, Servers, Target, Teacher
from stages.profile.training import Checkpoints, Distill, Qat, Shape, Start, Training
from stages.upstream.pinned import FILE as SOURCES_FILE
from stages.upstream.pinned import read_sources

__all__ = [
    "CATEGORIES", "Checkpoints", "Data", "DataSource", "Distill", "Fetch", "Limits", "LocalFile", "Profile",
    "Qat", "Selfcheck", "Serve", "Servers", "Shape", "Start", "Target", "Teacher", "Training", "Way",
    "load_profile",
]  # fmt: skip


class Profile(Section):
    """A whole job."""

    name: Name
    device: Literal["cpu", "cuda"]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    limits: Limits
    target: Target
    fetch: Fetch
    data: Data
    teacher: Teacher
    start: Start
    distill: Distill
    qat: Qat
    serve: Serve
    selfcheck: Selfcheck
    checkpoints: Checkpoints = Checkpoints()
    servers: Servers = Servers()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        needed = [self.target.source, self.start.source, *(source.source for source in self.data.sources)]
        missing = [source for source in needed if source and source not in self.fetch.sources]
        if missing:
            raise ValueError(f"fetch.sources must name {', '.join(missing)}")
        longest = max(self.data.max_prompt_tokens, self.target.max_prompt_tokens)
        if self.teacher.context_tokens < longest + self.teacher.max_tokens:
            raise ValueError(
                f"teacher.context_tokens must hold the longest prompt and teacher.max_tokens: at least "
                f"{longest + self.teacher.max_tokens}"
            )
        slow = [name for name in ("distill", "qat") if getattr(self, name).dtype == "float32"]
        if self.device == "cuda" and slow:
            raise ValueError(f"{slow[0]}.dtype must be 'bfloat16' where device is 'cuda': its attention over "
                             "packed rows takes no other")
        if (self.teacher.engine == "openai") != bool(self.servers.addresses):
            raise ValueError("teacher.engine = 'openai' needs servers.addresses, and only it takes them")
        if self.teacher.max_tokens > self.target.max_continuation_tokens:
            raise ValueError("teacher.max_tokens must not be over target.max_continuation_tokens")
        if unknown := [stop for stop in self.target.stop_ids if not 0 <= stop < self.target.token_count]:
            raise ValueError(f"target.stop_ids: {unknown[0]} is not below target.token_count")
        return self


def load_profile(name: str, folder: Path) -> Profile:
    """Read `folder/NAME.toml`, lay it over what it extends, and check the whole.

    Raises:
        UserError: no such profile, not TOML, a cycle of `extends`, or any key, type or value that is not
            allowed; the text names the file, the key and what is allowed.
    """
    merged = _merged(name, folder, seen=())
    merged["name"] = name
    path = folder / f"{name}.toml"
    try:
        profile = Profile.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        raise UserError(_explain(path, error)) from error
    pinned = read_sources(folder.parent / SOURCES_FILE)
    if unknown := [source for source in profile.fetch.sources if source not in pinned]:
        known = ", ".join(sorted(pinned))
        raise UserError(f"{path}: fetch.sources: {SOURCES_FILE} pins no {unknown[0]!r}. It pins: {known}")
    target = profile.target
    if target.revision not in (revisions := pinned[target.source].revisions):
        raise UserError(f"{path}: target.revision: {target.revision!r} is not what {SOURCES_FILE} pins "
                        f"{target.source} to: {' or '.join(revisions)}")
    return profile


def _merged(name: str, folder: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    path = folder / f"{name}.toml"
    if name in seen:
        raise UserError(f"{path}: extends itself, by way of {' -> '.join(seen)}")
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise UserError(f"{path}: there is no such profile. Profiles: {known}")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from error
    parent = own.pop("extends", None)
    if parent is None:
        return own
    if not isinstance(parent, str):
        raise UserError(f"{path}: extends: takes the name of one profile")
    return _over(_merged(parent, folder, (*seen, name)), own)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay one table over another: tables merge key by key, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def _explain(path: Path, error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "profile"
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text = f"unknown key. Allowed here: {_allowed(fault['loc'][:-1])}"
        elif fault["type"] == "missing":
            text = "is missing"
        elif not isinstance(fault["input"], dict):
            text += f" (found {fault['input']!r})"
        lines.append(f"{path}: {key}: {text}")
    return "\n".join(lines)


def _allowed(location: tuple[int | str, ...]) -> str:
    model: Any = Profile
    for part in location:
        if isinstance(part, str):
            model = model.model_fields[part].annotation
            model = next((a for a in getattr(model, "__args__", ()) if isinstance(a, type)), model)
    return ", ".join(sorted(model.model_fields))
