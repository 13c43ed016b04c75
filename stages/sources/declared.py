"""What lock/sources.toml declares about a fetched source, for the manifest."""

import tomllib
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import files_under, sha256_file

FILE = "lock/sources.toml"


def declared(root: Path, source: str) -> dict[str, Any]:
    """Return uri, revision, licence and note of a source, those of them that the file states.

    The table is read here, and not through `stages.upstream`, so that a change to fetching leaves the
    code digest of the data stage alone.

    Raises:
        UserError: the file, or the source in it, is missing.
    """
    path = root / FILE
    if not path.is_file():
        raise UserError(f"{path} is missing: it declares what may be fetched")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    if source not in tables:
        raise UserError(f"{FILE} has no source {source!r}; it has {', '.join(sorted(tables))}")
    entry = tables[source]
    stated = {key: entry[key] for key in ("uri", "licence", "note", "split") if key in entry}
    return stated | {"revision": entry["uri"].rpartition("@")[2]}


def hashed(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file under a folder, by its name relative to it."""
    return {name: sha256_file(folder / name) for name in files_under(folder)}
