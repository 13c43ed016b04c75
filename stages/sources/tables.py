"""Tables of conversations in files: parquet, JSON lines, YAML lists of talks; streamed, in a seeded order.

`columns` of the profile names what is read: `messages` (a list of turns, each with role and content, or plain
texts of user and assistant in turn) or `prompt` (the user's text); and, where there is one, `category`,
`family` and `language`. Whatever stands in a cell, only text is taken.
"""

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import yaml

from stages.errors import UserError
from stages.profile import DataSource
from stages.sources import Rejected, Row
from stages.sources.languages import UNKNOWN, code
from stages.sources.turns import alternating
from stages.upstream.evaluations import telling_word

READERS = {".parquet": "parquet", ".jsonl": "json", ".yml": "talks", ".yaml": "talks"}
COLUMNS = ("messages", "prompt", "category", "family", "language")
SHUFFLE_ROWS = 10_000
# What `datasets` and pyarrow raise over files that are cut, empty, or hold no table.
UNREADABLE = (ValueError, OSError, TypeError, StopIteration, datasets.exceptions.DatasetGenerationError)


def read(source: DataSource, paths: Sequence[Path], seed: int) -> Iterator[Row | Rejected]:
    """Yield the conversations of some files, all of one format, in a seeded order.

    Raises:
        UserError: formats are mixed, a file cannot be read, or a named column is not there.
    """
    _check_columns(source)
    readers = {READERS[path.suffix] for path in paths}
    if len(readers) > 1:
        raise UserError(f"data source {source.id!r} mixes file formats: {', '.join(p.name for p in paths)}")
    for number, record in enumerate(_records(source, paths, readers.pop(), seed)):
        missing = [column for column in source.columns.values() if column not in record]
        if missing:
            raise UserError(f"data source {source.id!r}: no column {missing[0]!r}; "
                            f"there are {', '.join(record)}")
        yield _row(source, record, str(number))


def refuse_evaluation(source: DataSource, names: Sequence[str]) -> None:
    """Refuse names of splits, configurations and files that say that they are for evaluation.

    Raises:
        UserError: one does.
    """
    for name in names:
        if word := telling_word(name):
            raise UserError(f"data source {source.id!r}: {name!r} says {word!r}: "
                            "nothing may be trained on a split that is for evaluation")


def _records(source: DataSource, paths: Sequence[Path], reader: str, seed: int
             ) -> Iterator[Mapping[str, Any]]:
    try:
        if reader == "talks":
            records = [record for path in paths for record in _talks(path)]
            table = datasets.IterableDataset.from_generator(lambda: iter(records))
        else:
            files = [glob.escape(str(path)) for path in paths]  # they are taken for patterns
            table = datasets.load_dataset(reader, data_files=files, split="train", streaming=True)
        yield from table.shuffle(seed=seed, buffer_size=SHUFFLE_ROWS)
    except UNREADABLE as error:
        reason = next(iter(str(error).splitlines()), "there is nothing in it")
        raise UserError(f"data source {source.id!r}: cannot read {', '.join(p.name for p in paths)}: "
                        f"{reason}") from error


def _talks(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the talks of a YAML file with a list `conversations`, each a list of texts."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        talks = content["conversations"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no YAML with a list 'conversations'") from error
    for talk in talks:
        yield {"conversations": [str(text) for text in talk]}


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
        cell = record[source.columns[name]] if name in source.columns else None
        return otherwise if cell is None else str(cell)

    if "messages" in source.columns:
        messages = alternating(record[source.columns["messages"]])
    else:
        prompt = record[source.columns["prompt"]]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    if not messages:
        return Rejected("not a conversation")
    category = value("category", source.category or "")
    if not category:
        return Rejected("no category")
    language = code(value("language", UNKNOWN)) if "language" in source.columns else "en"
    return Row(f"{source.id}/{value('family', number)}", category, tuple(messages), language)
