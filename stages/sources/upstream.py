"""What lock/sources.toml declares about a fetched source, for the manifest."""

import tomllib
from pathlib import Path
from typing import Any

from stages.errors import UserError

KEYS = ("uri", "revision", "licence")


def declared(root: Path, source: str) -> dict[str, Any]:
    """Return uri, revision and licence of a source of lock/sources.toml, those of them that it states.

    Raises:
        UserError: the file or the source in it is missing.
    """
    path = root / "lock" / "sources.toml"
    if not path.is_file():
        raise UserError(f"{path} is missing: it declares what may be fetched")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    entry = table.get("sources", table).get(source)
    if entry is None:
        raise UserError(f"{path}: declares no source {source!r}")
    return {key: entry[key] for key in KEYS if key in entry}
