"""How fast the teacher writes: what each of its runs did, kept beside its shards for the record."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from stages.files import read_jsonl

FILE = "pace.jsonl"  # of a work folder; one line for each shard, by whom and when it was written


def next_run(folder: Path) -> int:
    """Return the number of a run that begins now: 0 for the first, that of a resumed one is higher."""
    path = folder / FILE
    return max((line["run"] for line in read_jsonl(path)), default=-1) + 1 if path.is_file() else 0


def note(folder: Path, run: int, shard: str, tokens: int, seconds: float) -> None:
    """Note that this process has written a shard, about to get its name; ranks do so side by side."""
    line = json.dumps({"run": run, "rank": os.getpid(), "shard": shard, "tokens": tokens, "seconds": seconds})
    with (folder / FILE).open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


def paces(folder: Path) -> list[dict[str, Any]]:
    """Return for each run that wrote a shard, in order: ranks, tokens, seconds, tokens_per_second.

    Seconds are of generating alone, those of the rank that was longest at it. A shard that a killed run did
    not come to name is of the run that wrote it again.
    """
    path = folder / FILE
    lines = {line["shard"]: line for line in read_jsonl(path)} if path.is_file() else {}
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


def told(run: dict[str, Any]) -> str:
    """Return a run's pace in words."""
    return f"{run['tokens']:,} tokens in {run['seconds']:,.1f} s, {run['tokens_per_second']:,} a second"
