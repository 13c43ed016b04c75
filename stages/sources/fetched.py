"""What the kinds `hub` and `package` share: files of a fetched source, as lock/sources.toml names them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import files_under, sha256_file
from stages.profile import DataSource
from stages.sources import Context, Rejected, Row, tables
from stages.upstream.pinned import FILE, Source, declared, find, read_sources


def rows(source: DataSource, context: Context, kind: str) -> Iterator[Row | Rejected]:
    """Yield the conversations of a fetched source's training files, in a seeded order.

    Raises:
        UserError: the source is of another kind, or a split or file of it is for evaluation.
    """
    _pinned(source, context, kind)
    folder, names = _files(source, context)
    yield from tables.read(source, [folder / name for name in names], context.job.seed)


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Return what the lock declares, the split, and the files that were read."""
    folder, names = _files(source, context)
    files = {name: sha256_file(folder / name) for name in names}
    return declared(context.job.root, str(source.source)) | {
        "source": source.source, "split": source.split, "columns": dict(source.columns), "files": files,
    }


def _pinned(source: DataSource, context: Context, kind: str) -> Source:
    pinned = find(read_sources(context.job.root / FILE), str(source.source))
    if pinned.kind != kind:
        raise UserError(f"data source {source.id!r}: {source.source} is of kind {pinned.kind!r} in {FILE}, "
                        f"not {kind!r}")
    if pinned.kind == "hub" and pinned.repo_type != "dataset":
        raise UserError(f"data source {source.id!r}: {source.source} is a model, and no set of data")
    if pinned.split is not None and pinned.split != source.split:
        raise UserError(f"data source {source.id!r}: split is {source.split!r}, and {FILE} fetches "
                        f"{pinned.split!r} of {source.source}")
    return pinned


def _files(source: DataSource, context: Context) -> tuple[Path, list[str]]:
    """Return the folder and the files of the wanted split."""
    folder = context.job.inputs["fetch"] / str(source.source)
    found = files_under(folder) if folder.is_dir() else []
    found = [name for name in found if Path(name).suffix in tables.READERS]
    tables.refuse_evaluation(source, (source.split, *found))
    named = re.compile(rf"(?<![a-z0-9]){re.escape(source.split)}(?![a-z0-9])")
    wanted = [name for name in found if named.search(name)]
    if not wanted and source.split == "train":
        wanted = found  # a repository without splits is one training split
    if not wanted:
        raise UserError(f"{folder}: no {', '.join(tables.READERS)} file of split {source.split!r}; "
                        f"found {', '.join(found) or 'none'}")
    return folder, wanted
