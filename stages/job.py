"""What a stage function is given: its config, its inputs, its places and its voice."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from stages.wrapper.redaction import hide_secrets, without_private

Item = TypeVar("Item")


@dataclass(frozen=True)
class Job:
    """One run of one stage.

    Attributes:
        stage: the stage's name.
        config: an object with one attribute for each profile section that the stage declares.
        inputs: for each upstream stage, the folder of its outputs.
        out: an empty folder to fill (for an in-place stage: its place itself).
        work: a folder that survives a kill, private to this key: checkpoints go here.
        root: the repository, for the files that the stage declares.
        seed: the profile's seed.
        device: 'cpu' or 'cuda'.
        log: the stage's log file; events are appended to it as JSON lines.
        checkpoint_s: seconds between two checkpoints of a long stage; 0 is as often as it can.
        runner: what carries stages out, for one that starts containers itself.
        reach: addresses of servers that the stage may reach, and no other machine.
    """

    stage: str
    config: Any
    inputs: dict[str, Path]
    out: Path
    work: Path
    root: Path
    seed: int
    device: str
    log: Path
    checkpoint_s: float = 300.0
    runner: str = "host"
    reach: tuple[str, ...] = ()

    @property
    def kept(self) -> Path:
        """A folder that survives a change of key: what is put there is named by a key of its own."""
        return self.work.parent / f"{self.stage}.kept"

    def say(self, text: str) -> None:
        """Tell the user one line, and the log."""
        tqdm.write(hide_secrets(f"{self.stage}: {text}"), file=sys.stderr)
        self.event("say", text=text)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event, with the time, to the stage's log."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": now, "stage": self.stage, "event": kind}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as stream:
            line |= without_private(fields, self.root)
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def progress(self, items: Iterable[Item], total: int | None = None, unit: str = "it",
                 start: int = 0) -> Iterator[Item]:
        """Iterate behind a progress bar with the time left; `start` items are already done."""
        bar = tqdm(items, total=total, unit=unit, initial=start, desc=self.stage, file=sys.stderr,
                   mininterval=1.0 if sys.stderr.isatty() else 20.0, dynamic_ncols=True)
        yield from bar
