"""What the kinds `jsonl` and `parquet` share: files of the user's own, by their hash."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import digest_of, sha256_file
from stages.profile import DataSource
from stages.sources import Context, Rejected, Row, tables


def rows(source: DataSource, context: Context) -> Iterator[Row | Rejected]:
    """Yield the conversations of the files, in a seeded order.

    Raises:
        UserError: a file is missing, hashes otherwise, is of another format, or is for evaluation.
    """
    tables.refuse_evaluation(source, (source.split, *(file.path for file in source.files)))
    paths = [_checked(source, context.job.root, file.path, file.sha256) for file in source.files]
    yield from tables.read(source, paths, context.job.seed)


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Return what the profile states."""
    files = {file.path: file.sha256 for file in source.files}
    return {
        "uri": source.uri, "revision": f"sha256:{digest_of(files)}", "licence": source.licence,
        "columns": dict(source.columns), "files": files,
        "command": "put the files in their place; their sha256 is in the profile",
    }


def _checked(source: DataSource, root: Path, name: str, sha256: str) -> Path:
    path = root / name
    if path.suffix != f".{source.kind}":
        raise UserError(f"data source {source.id!r}: {name} is no .{source.kind} file")
    if not path.is_file():
        raise UserError(f"data source {source.id!r}: {path} is missing; correct the profile")
    if (found := sha256_file(path)) != sha256:
        raise UserError(f"data source {source.id!r}: {name} has sha256 {found}; the profile pins {sha256}")
    return path
