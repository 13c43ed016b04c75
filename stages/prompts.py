"""Prompt rows of a JSON-lines file, read when they are wanted: in memory is where each begins."""

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PromptRow = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Some rows of a file, in an order of their own.

    Attributes:
        path: the file.
        places: where the line of each row begins, in bytes.
    """

    path: Path
    places: "array[int]"

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.places)

    def __iter__(self) -> Iterator[PromptRow]:
        """Read the rows, one by one."""
        with self.path.open("rb") as stream:
            for place in self.places:
                stream.seek(place)
                yield json.loads(stream.readline())

    def cut(self, size: int) -> Iterator["Prompts"]:
        """Yield parts of so many rows; the last may have fewer."""
        for first in range(0, len(self), size):
            yield Prompts(self.path, self.places[first : first + size])

    def by_id(self) -> "Prompts":
        """Return the same rows in the order of their ids."""
        ordered = sorted((str(row["id"]), place) for row, place in zip(self, self.places, strict=True))
        return Prompts(self.path, array("q", (place for _, place in ordered)))


def read_prompts(path: Path, wanted: Callable[[PromptRow], bool] = bool) -> Prompts:
    """Return the wanted rows of a file by length, then id: parts of them pad little as batches."""
    found, place = [], 0
    with path.open("rb") as stream:
        for line in stream:
            row = json.loads(line)
            if wanted(row):
                found.append((len(row["prompt"]), row["id"], place))
            place += len(line)
    found.sort()
    return Prompts(path, array("q", (place for *_, place in found)))
