"""Rows on their way to a file, shuffled: as many as the disk holds, few of them in memory."""

import hashlib
import shutil
from pathlib import Path
from typing import TextIO


class Spool:
    """Gathers the lines of one file in buckets of like key, then writes them in the order of their keys.

    The order is a shuffle that further lines do not disturb: a line's key is a digest of its name alone.

    Args:
        folder: where the buckets may lie until then; what an earlier, killed run left there goes.
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._buckets: dict[str, TextIO] = {}
        self.count = 0

    def add(self, name: str, line: str) -> None:
        """Add a line, without its end, under a name that no other has."""
        key = hashlib.sha256(name.encode()).hexdigest()
        place = f"{int(key[:2], 16) // 4:02}"  # 64 files: as many as may surely be open
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = (self._folder / place).open("w", encoding="utf-8")
        bucket.write(f"{key} {line}\n")
        self.count += 1

    def write(self, path: Path) -> None:
        """Write all lines, and forget them."""
        with path.open("w", encoding="utf-8") as target:
            for name in sorted(self._buckets):
                self._buckets[name].close()
                with (self._folder / name).open(encoding="utf-8", newline="\n") as bucket:
                    target.writelines(line.partition(" ")[2] for line in sorted(bucket))
        shutil.rmtree(self._folder)
        self._buckets.clear()
