"""The section on prompts: their sources, and what is kept of them."""

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stages.profile.section import Count, Name, Rate, Section, Share
from stages.upstream.evaluations import evaluation_at
from stages.upstream.pinned import Licence, RelativePath

Way = Literal["opening", "system", "subject", "beginning", "examples", "follow-up"]  # stages/sources/leads.py

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class LocalFile(Section):
    """A file of the user's own, under the repository's folder, by its hash."""

    path: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _inside(self) -> Self:
        parts = PurePosixPath(self.path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError("path must be relative and stay under the repository's folder")
        return self


class DataSource(Section):
    """One source of training prompts.

    `source` (an id of lock/sources.toml) belongs to the kinds `hub` and `package`; `files`, `uri` and
    `licence` to `jsonl` and `parquet`; `columns` and `category` to all four; temperature, top_p, the turn's
    tokens and `ways` (how the target is led to invent; empty: all) to `synth`. `heldout` keeps the whole
    source for choosing.
    """

    id: Name
    kind: Literal["template", "synth", "hub", "package", "jsonl", "parquet"]
    rows: Count
    source: Name | None = None
    files: tuple[LocalFile, ...] = ()
    uri: Annotated[str, Field(min_length=1)] | None = None
    licence: Licence | None = None
    split: str = "train"
    columns: dict[str, str] = Field(default_factory=dict)
    category: str | None = None
    heldout: bool = False
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    max_turn_tokens: Count = 96
    min_turn_tokens: Count = 6
    ways: tuple[Way, ...] = ()

    @model_validator(mode="after")
    def _keys_of_kind(self) -> Self:
        if self.ways and self.kind != "synth":
            raise ValueError("ways belong to kind 'synth'")
        if (self.kind in ("hub", "package")) != (self.source is not None):
            raise ValueError("kinds 'hub' and 'package' need source, an id of lock/sources.toml; "
                             "other kinds take none")
        stated = (bool(self.files), self.uri is not None, self.licence is not None)
        if any(stated) != all(stated) or (self.kind in ("jsonl", "parquet")) != any(stated):
            raise ValueError("kinds 'jsonl' and 'parquet' need files, uri and licence; other kinds take none")
        if self.uri and (told := evaluation_at(self.uri)):
            raise ValueError(f"uri {self.uri!r} says {told!r}, which is for evaluation and never trained on")
        return self


class Data(Section):
    """Prompts for training, and those split off for choosing.

    `category_limits` gives the most that a category may have, as a share of all rows that are asked for.
    `decontaminate` names further JSON-lines files whose conversations must not be trained on.
    """

    heldout_share: Share = 0.1
    max_prompt_tokens: Count
    shared_words: Count = 13
    near_duplicate: Rate = 0.8
    near_evaluation: Rate = 0.5
    decontaminate: tuple[RelativePath, ...] = ()
    category_limits: dict[str, Share] = Field(default_factory=dict)
    sources: tuple[DataSource, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ids = [source.id for source in self.sources]
        if len(set(ids)) < len(ids):
            raise ValueError(f"two sources share an id: {ids}")
        known = {*CATEGORIES, *(source.category for source in self.sources)}
        told = not any("category" in source.columns for source in self.sources)  # else rows will tell
        if told and (unknown := sorted(self.category_limits.keys() - known)):
            raise ValueError(f"category_limits names {unknown[0]!r}, which no source has: there are "
                             f"{', '.join(sorted(filter(None, known)))}")
        if all(source.heldout for source in self.sources):
            raise ValueError("every source is held out: none is left to train on")
        return self
