"""The templates and the lists that fill their places, read from TOML and checked whole."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.profile import CATEGORIES

PLACE = re.compile(r"\{(?:(?:([a-z_]\w*)=)?(\d+)\.\.(\d+)(?:/(\d+))?|([a-z_]+)(\d*))\}")


@dataclass(frozen=True)
class Template:
    """One family of prompts; `plain` means that its text must not be roughened."""

    id: str
    category: str
    turns: tuple[str, ...]
    language: str
    plain: bool


@dataclass(frozen=True)
class Library:
    """All templates with the lists that fill them: `verbatim` values are copied, others expanded."""

    templates: tuple[Template, ...]
    lists: dict[str, list[str]]
    verbatim: dict[str, list[str]]


def load_library(folder: Path) -> Library:
    """Read the category files and the fillers.

    Raises:
        UserError: a template that does not end with the user, an id used twice, a place that nothing fills.
    """
    fillers = tomllib.loads((folder / "fillers.toml").read_text(encoding="utf-8"))
    reader = _Reader(fillers["lists"], fillers["verbatim"])
    templates: list[Template] = []
    for category in CATEGORIES:
        tables = tomllib.loads((folder / f"{category}.toml").read_text(encoding="utf-8"))["template"]
        templates += [reader.template(category, table) for table in tables]
    ids = [template.id for template in templates]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise UserError(f"{folder}: template ids used twice: {', '.join(twice)}")
    return Library(tuple(templates), reader.lists, reader.verbatim)


class _Reader:
    def __init__(self, lists: dict[str, list[str]], verbatim: dict[str, list[str]]) -> None:
        self.lists = lists
        self.verbatim = verbatim
        drawn = {name: set(self._drawn("\n".join(lists[name]), f"list {name}")) for name in lists}
        self._copies = {name for name, used in drawn.items() if used & set(verbatim)} | set(verbatim)

    def template(self, category: str, table: dict[str, Any]) -> Template:
        turns = tuple(table["turns"]) if "turns" in table else (table["text"],)
        if len(turns) % 2 == 0:
            raise UserError(f"template {table['id']}: turns must end with the user's")
        drawn = set(self._drawn("\n".join(turns), f"template {table['id']}"))
        plain = table.get("plain", False) or bool(drawn & self._copies)
        return Template(table["id"], category, turns, table.get("language", "en"), plain)

    def _drawn(self, text: str, where: str) -> Iterator[str]:
        """Yield the lists that a text draws from; refuse a place that nothing fills."""
        numbers = {match[1] for match in PLACE.finditer(text) if match[1]}
        for match in PLACE.finditer(text):
            name = match[5]
            if name is None or match[0][1:-1] in numbers:
                continue
            if name not in self.lists and name not in self.verbatim:
                raise UserError(f"{where}: {match[0]} is neither a list of fillers.toml nor a number")
            yield name
