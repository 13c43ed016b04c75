"""Rows of a fetched data set: its training split, read from parquet or JSON lines, never another split.

`columns` of the profile names what is read: `messages` (a list of turns, each with role and content) or
`prompt` (the user's text); and, where there is one, `category`, `family` and `language`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from stages.errors import UserError
from stages.files import files_under, sha256_file
from stages.models.tokenizer import Message
from stages.profile import DataSource
from stages.sources import Context, Rejected, Row
from stages.sources.declared import declared

READERS = {".parquet": "parquet", ".jsonl": "json"}
EVALUATION_WORDS = frozenset(
    ("validation", "valid", "val", "dev", "development", "test", "tests", "testing", "eval", "evaluation",
     "benchmark", "benchmarks", "heldout", "holdout")
)
COLUMNS = ("messages", "prompt", "category", "family", "language")
SHUFFLE_ROWS = 10_000
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def rows(source: DataSource, context: Context) -> Iterator[Row | Rejected]:
    """Yield the conversations of the split, in a seeded order.

    Raises:
        UserError: the split or a file of it is for evaluation, or a named column is not there.
    """
    folder, names = _files(source, context)
    _check_columns(source)
    reader = READERS[Path(names[0]).suffix]
    paths = [str(folder / name) for name in names]
    table = datasets.load_dataset(reader, data_files=paths, split="train", streaming=True)
    table = table.shuffle(seed=context.job.seed, buffer_size=SHUFFLE_ROWS)
    for number, record in enumerate(table):
        missing = [column for column in source.columns.values() if column not in record]
        if missing:
            raise UserError(f"data source {source.id!r}: no column {missing[0]!r}; "
                            f"there are {', '.join(record)}")
        yield _row(source, record, str(number))


def _files(source: DataSource, context: Context) -> tuple[Path, list[str]]:
    """Return the folder and the files of the wanted split, all of one format."""
    folder = context.job.inputs["fetch"] / str(source.source)
    found = [name for name in files_under(folder) if Path(name).suffix in READERS] if folder.is_dir() else []
    for name in (source.split, *found):
        if forbidden := EVALUATION_WORDS.intersection(_name_words(name)):
            raise UserError(f"data source {source.id!r}: {name!r} says {sorted(forbidden)[0]!r}: "
                            "nothing may be trained on a split that is for evaluation")
    named = re.compile(rf"(?<![a-z0-9]){re.escape(source.split)}(?![a-z0-9])")
    wanted = [name for name in found if named.search(name)]
    if not wanted and source.split == "train":
        wanted = found  # a repository without splits is one training split
    if not wanted:
        raise UserError(f"{folder}: no parquet or JSON-lines file of split {source.split!r}; "
                        f"found {', '.join(found) or 'none'}")
    if len({READERS[Path(name).suffix] for name in wanted}) > 1:
        raise UserError(f"{folder}: split {source.split!r} mixes file formats: {', '.join(wanted)}")
    return folder, wanted


def _name_words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())


def _check_columns(source: DataSource) -> None:
    if unknown := sorted(source.columns.keys() - set(COLUMNS)):
        raise UserError(f"data source {source.id!r}: columns has no {unknown[0]!r}; "
                        f"it takes {', '.join(COLUMNS)}")
    if ("messages" in source.columns) == ("prompt" in source.columns):
        raise UserError(f"data source {source.id!r}: columns needs one of messages and prompt")
    if source.category is None and "category" not in source.columns:
        raise UserError(f"data source {source.id!r}: needs a category, or a column that holds it")


def _row(source: DataSource, record: Mapping[str, Any], number: str) -> Row | Rejected:
    def value(name: str, otherwise: str) -> str:
        return str(record[source.columns[name]]) if name in source.columns else otherwise

    turns = record[source.columns["messages"]] if "messages" in source.columns else None
    messages = [{"role": "user", "content": value("prompt", "")}] if turns is None else _alternating(turns)
    if not messages:
        return Rejected("not a conversation")
    return Row(value("family", number), value("category", source.category or ""), tuple(messages),
               value("language", "en"))


def _alternating(turns: Any) -> list[Message]:
    """Return the turns as far as user and assistant alternate, up to the user's last; no system prompt."""
    messages: list[Message] = []
    for turn in turns or ():
        role = ROLES.get(str(turn.get("role", turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if role == "system" and not messages:
            continue
        if role != ("user", "assistant")[len(messages) % 2] or not isinstance(content, str):
            break
        messages.append({"role": str(role), "content": content})
    return messages[: len(messages) - (len(messages) % 2 == 0)] if messages else []


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Return what the lock declares, the split, and the files that were read."""
    folder, names = _files(source, context)
    files = {name: sha256_file(folder / name) for name in names}
    return declared(context.job.root, str(source.source)) | {
        "source": source.source, "split": source.split, "columns": dict(source.columns), "files": files,
    }
