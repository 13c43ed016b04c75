"""How fast the teacher writes: what each of its runs did, kept beside its shards for the record."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.files import whole_rows

FILE = "pace.jsonl"  # of a work folder; one line for each shard, by whom and when it was written


def next_run(folder: Path) -> int:
    """Return the number of a run that begins now: 0 for the first, that of a resumed one is higher."""
    return max((line["run"] for line in _lines(folder)), default=-1) + 1


def note(folder: Path, run: int, shard: str, tokens: int, seconds: float) -> None:
    """Note that this process has written a shard, about to get its name; ranks do so side by side."""
    line = json.dumps({"run": run, "rank": os.getpid(), "shard": shard, "tokens": tokens, "seconds": seconds})
    with (folder / FILE).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")  # a full disk may have cut the last one off


def paces(folder: Path) -> list[dict[str, Any]]:
    """Return for each run that wrote a shard, in order: ranks, tokens, seconds, tokens_per_second.

    Seconds are of generating alone, those of the rank that was longest at it. A shard that a killed run did
    not come to name is of the run that wrote it again.
    """
    lines = {line["shard"]: line for line in _lines(folder)}
    ranks: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    for line in lines.values():
        sums = ranks[line["run"]][line["rank"]]
        sums[0] += line["tokens"]
        sums[1] += line["seconds"]
    found = []
    for _, run in sorted(ranks.items()):
        tokens, seconds = int(sum(one[0] for one in run.values())), max(one[1] for one in run.values())
        found.append({"ranks": len(run), "tokens": tokens, "seconds": round(seconds, 3),
                      "tokens_per_second": round(tokens / seconds)})
    return found


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what was noted, whatever else has come into the file: no shard is written again for its pace."""
    path = folder / FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    kinds = {"run": int, "rank": int, "shard": str, "tokens": int, "seconds": float}
    for line in whole_rows(text):
        if all(isinstance(line.get(key), kind) for key, kind in kinds.items()):
            yield line


def told(run: dict[str, Any]) -> str:
    """Return a run's pace in words."""
    return f"{run['tokens']:,} tokens in {run['seconds']:,.1f} s, {run['tokens_per_second']:,} a second"
