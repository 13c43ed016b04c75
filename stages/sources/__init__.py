"""Kinds of data sources: one module each, with the functions `rows` and `origin`."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from stages.job import Job
from stages.models.tokenizer import Message, Tokenizer
from stages.profile import DataSource


@dataclass(frozen=True)
class Row:
    """One conversation that ends with a user turn.

    Attributes:
        family: what it must not be parted from when rows are held out, whichever source they come from: its
            template, or its own name.
        category: one of `profile.CATEGORIES`, or the source's own.
        messages: turns of user and assistant in alternation, the first and last of the user.
        language: its code, see languages.py.
    """

    family: str
    category: str
    messages: tuple[Message, ...]
    language: str = "en"


@dataclass(frozen=True)
class Rejected:
    """A conversation that the source itself threw away, and why."""

    reason: str


@dataclass(frozen=True)
class Context:
    """What a source may use besides its own table of the profile.

    Attributes:
        metrics: what a source reports of its work, by its id, for the stage's record.
        shared: what all sources of a kind have in common, by the kind.
    """

    job: Job
    tokenizer: Tokenizer
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """What a module of this package offers."""

    def rows(self, source: DataSource, context: Context) -> Iterator[Row | Rejected]:
        """Yield conversations, seeded and in a fixed order; more than `source.rows` where there are more."""

    def origin(self, source: DataSource, context: Context) -> dict[str, Any]:
        """Say for the manifest where the rows come from: author, licence, revision, files with sha256."""


def load_kind(kind: str) -> Source:
    """Return the module of a kind of source."""
    return cast(Source, importlib.import_module(f"{__name__}.{kind}"))
