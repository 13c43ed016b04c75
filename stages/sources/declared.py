"""What lock/sources.toml declares about a fetched source, for the manifest."""

import tomllib
from pathlib import Path
from typing import Any

from stages.errors import UserError

FILE = "lock/sources.toml"


def declared(root: Path, source: str) -> dict[str, Any]:
    """Return uri, revision, licence, note, split and files (name to sha256), those of them that are stated.

    The table is read here, and not through `stages.upstream.pinned`, so that a change to fetching leaves the
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
    files = {file["path"]: file["sha256"] for file in entry.get("files", ())}
    return stated | {"revision": entry["uri"].rpartition("@")[2]} | ({"files": files} if files else {})
