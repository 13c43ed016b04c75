"""Prompts from templates: texts with places to fill, drawn with a seed.

A template is a `[[template]]` table of one of the category files: `id`, and `text` (one user turn) or
`turns` (user, assistant, user, ...). In it and in the fillers

    {town}        is a value of the list `town`; the same value wherever it stands in the conversation
    {town2}       is another value of the same list
    {a=10..500}   is a whole number, to be used again as {a}; {10..500/5} goes in steps of five
    [[this|that]] is one of the alternatives, which may be empty

Values of `[lists]` may hold places themselves; values of `[verbatim]` (code, for the most part) are copied.
Turns in English without verbatim text are roughened now and then: lower case, a slip of the keys, a greeting.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.files import digest_of, sha256_file
from stages.profile import CATEGORIES, DataSource
from stages.sources import Context, Rejected, Row
from stages.sources.library import PLACE, Library, Template, load_library
from stages.sources.roughening import roughened

FOLDER = Path("stages/sources/templates")
_CHOICE = re.compile(r"\[\[([^\[\]]*\|[^\[\]]*)\]\]")
_ARTICLE = re.compile(r"\b([Aa]) (?!(?:and|are|as|at|if|in|is|of|on|once?|one|or)\b)"
                      r"(?=[aeio][a-z]|u(?!ni|se|ku)[a-z])")
_ROLES = ("user", "assistant")


class Filling:
    """The values of one conversation."""

    def __init__(self, library: Library, rng: random.Random) -> None:
        self._library = library
        self._rng = rng
        self._values: dict[str, str] = {}

    def expand(self, text: str) -> str:
        """Return the text with every place filled."""
        text = _CHOICE.sub(lambda match: self._rng.choice(match[1].split("|")), text)
        return PLACE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, low, high, step, listed, _number = match.groups()
        if listed is not None:
            key = match[0][1:-1]
            return self._values[key] if key in self._values else self._draw(key, listed)
        value = str(self._rng.randrange(int(low), int(high) + 1, int(step or 1)))
        if name is not None:
            self._values[name] = value
        return value

    def _draw(self, key: str, name: str) -> str:
        verbatim = self._library.verbatim.get(name)
        taken = set(self._values.values())
        values = verbatim if verbatim is not None else self._library.lists[name]
        for _ in range(8):  # another place wants another value, as long as the list has one
            drawn = self._rng.choice(values)
            value = drawn if verbatim is not None else self.expand(drawn)
            if value not in taken:
                break
        self._values[key] = value
        return value


def rows(source: DataSource, context: Context) -> Iterator[Row | Rejected]:
    """Yield conversations without end: every template once, in a seeded order, then all again."""
    library = load_library(context.job.root / FOLDER)
    cycle = 0
    while True:
        order = list(library.templates)
        random.Random(f"{context.job.seed}/{source.id}/{cycle}").shuffle(order)  # noqa: S311
        for template in order:
            yield draw(library, template, f"{context.job.seed}/{source.id}/{template.id}/{cycle}")
        cycle += 1


def draw(library: Library, template: Template, seed: str) -> Row:
    """Fill one template; the same seed gives the same conversation."""
    rng = random.Random(seed)  # noqa: S311
    filling = Filling(library, rng)
    turns = [filling.expand(turn).strip() for turn in template.turns]
    if template.language == "en" and not template.plain:
        turns = [_ARTICLE.sub(r"\1n ", turn) for turn in turns]
        turns = [turn if index % 2 else roughened(turn, rng) for index, turn in enumerate(turns)]
    messages = tuple({"role": _ROLES[index % 2], "content": turn} for index, turn in enumerate(turns))
    return Row(f"templates/{template.id}", template.category, messages, template.language)


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Templates and fillers were written for this repository and lie in it."""
    names = ["fillers.toml", *(f"{category}.toml" for category in CATEGORIES)]
    root = context.job.root
    files = {(FOLDER / name).as_posix(): sha256_file(root / FOLDER / name) for name in names}
    return {"author": "this repository", "uri": f"repository:{FOLDER.as_posix()}",
            "revision": f"sha256:{digest_of(files)}", "licence": "Apache-2.0", "files": files,
            "command": "make data"}
