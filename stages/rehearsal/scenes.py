"""A submission run as the grader runs it: started, asked over TCP, stopped, and looked at again.

    python -m stages.rehearsal.scenes PLAN.json RESULT.json           start a server here, and ask it
    python -m stages.rehearsal.scenes PLAN.json RESULT.json --twin    ask one that somebody else starts

The first is the rehearsal without containers: where the system allows it the server and this client are alone
on a network without an outside, and the server has another user, or at least no capabilities. The second is
the client of `stages.rehearsal.twin`.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter.replay import Conversation, read_conversations
from stages.files import files_under, sha256_file, write_json
from stages.rehearsal import isolation
from stages.rehearsal.client import Terms, replay_http
from stages.rehearsal.projection import openings, windows
from stages.rehearsal.server import CONTRACT, POLL_S, Line, SceneError, start_here

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
# Files by which the client of a twin and its conductor tell each other where they are.
ASKING, STARTED, ENDED = "asking", "started", "ended"

# What is replayed under a name: the conversations of a file as they are, or some part of each.
PARTS: dict[str, Callable[[Sequence[Conversation]], list[Conversation]]] = {
    "whole": list, "windows": windows, "openings": openings}

# Can a user enter this Python, find the modules in it, and read the file? (A home may be closed to others.)
PROBE = """
import importlib.util, sys
for name in sys.argv[2:]:
    open(importlib.util.find_spec(name).origin).close()
open(sys.argv[1]).close()
"""


@dataclass(frozen=True)
class Plan:
    """What to rehearse.

    Attributes:
        submission: the copy to run; its owner may become the server's user.
        scratch: an empty folder for the server's log, home and temporary files.
        sets: names and files of conversations.
        replays: what is replayed, in this order: a name for it, the set, and which part of it (see PARTS).
        terms: how the grader asks.
        start_timeout_s: time until /health must answer 200.
        stop_timeout_s: time from SIGTERM until nothing of the server may be left.
    """

    submission: Path
    scratch: Path
    sets: tuple[tuple[str, Path], ...]
    replays: tuple[tuple[str, str, str], ...]
    terms: Terms
    start_timeout_s: float
    stop_timeout_s: float = 20.0

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Plan":
        """Read a plan from plain values."""
        sets = tuple((name, Path(path)) for name, path in row["sets"])
        replays = tuple((name, of, part) for name, of, part in row["replays"])
        places = {"submission": Path(row["submission"]), "scratch": Path(row["scratch"])}
        return cls(**row | places | {"sets": sets, "replays": replays, "terms": Terms(**row["terms"])})


def rehearse(plan: Plan) -> dict[str, Any]:
    """Rehearse in a process of its own, without a network where that can be had; return what was seen.

    Returns:
        `stage`: the last stage reached (start, smoke, replay, stop); `reason`: why it went no further;
        `environment`; `start_s`; `smoke`; `sets`: counts and steps of each replay; `health`: the status
        after them; `stop`; `changed`: names added to, changed in or gone from the submission; `log_tail`.
        Keys of stages that were not reached are missing.
    """
    request, answer = plan.scratch / "plan.json", plan.scratch / "result.json"
    write_json(request, plain(plan))
    command = [sys.executable, "-m", "stages.rehearsal.scenes", str(request), str(answer)]
    subprocess.run(isolation.command("--no-network", command=command), check=True, cwd=ROOT)
    return json.loads(answer.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def plain(plan: Plan) -> Any:
    """Return a plan as plain values."""
    return json.loads(json.dumps(asdict(plan), default=str))


def main(argv: list[str] | None = None) -> int:
    """Rehearse what PLAN.json says, here and now, and write what was seen to RESULT.json."""
    parser = argparse.ArgumentParser(prog="python -m stages.rehearsal.scenes", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--twin", action="store_true")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    plan = Plan.from_json(json.loads(options.plan.read_text(encoding="utf-8")))
    write_json(options.result, _ask_twin(plan, options.result.parent) if options.twin else _rehearse(plan))
    while options.twin:  # the server's container stands on this one's network, so it must go first
        signal.pause()
    return 0


def _rehearse(plan: Plan) -> dict[str, Any]:
    isolate, user = lesser_user(plan.submission / "serve.sh")
    folders = [plan.scratch / "home", plan.scratch / "tmp"]
    for folder in folders:
        folder.mkdir()
    if "--user" in isolate:
        hand_over(NOBODY, plan.submission, *folders)
    before = snapshot(plan.submission)
    server, line = start_here(plan.submission, plan.scratch, isolate)
    with server:
        seen = _scenes(plan, line)
        seen["stop"] = server.stop(plan.stop_timeout_s)
    seen["changed"] = changed(before, snapshot(plan.submission))
    seen["log_tail"] = server.log_tail()
    return seen | {"environment": {"network": os.environ.get(isolation.NETWORK, "open: not asked for"),
                                   "user": user, "twin": "none: rehearsed on the host itself"}}


def _ask_twin(plan: Plan, meeting: Path) -> dict[str, Any]:
    """Ask a server that the conductor starts once this client is there; files in `meeting` say when."""
    def ended() -> str:
        path = meeting / ENDED
        return path.read_text(encoding="utf-8") if path.exists() else ""

    line = Line(int(CONTRACT["PORT"]), ended)
    (meeting / ASKING).touch()
    while not (meeting / STARTED).exists():
        time.sleep(POLL_S)
    return _scenes(plan, line)


def _scenes(plan: Plan, line: Line) -> dict[str, Any]:
    seen: dict[str, Any] = {"stage": "start", "reason": None, "sets": {}}
    sets = {name: read_conversations(path) for name, path in plan.sets}
    try:
        seen["start_s"] = round(line.wait_until_healthy(plan.start_timeout_s), 3)
    except SceneError as error:
        return seen | {"reason": str(error)}
    seen["stage"] = "smoke"
    first = next(iter(sets.values()))[0]
    seen["smoke"] = line.smoke(list(first.prompt), plan.terms.request_timeout_s)
    seen["stage"] = "replay"
    for name, of, part in plan.replays:
        seen["sets"][name] = _replay(name, PARTS[part](sets[of]), line.url, plan.terms)
    seen["health"] = line.health()
    seen["stage"] = "stop"
    return seen


def _replay(name: str, conversations: list[Conversation], url: str, terms: Terms) -> dict[str, Any]:
    total = sum(len(conversation.continuation) for conversation in conversations)
    start = time.perf_counter()
    with tqdm(total=total, unit="token", desc=f"selfcheck: replay {name}", file=sys.stderr,
              dynamic_ncols=True, mininterval=1.0 if sys.stderr.isatty() else 20.0) as bar:
        replayed = replay_http(conversations, url, terms, bar.update)
    steps = [asdict(found) for found in replayed.steps]
    wall_s = round(time.perf_counter() - start, 3)
    return replayed.to_json() | {"tokens": total, "wall_s": wall_s, "steps": steps}


def lesser_user(file: Path) -> tuple[list[str], str]:
    """Return the options that take the most from a server that must read `file`, and a name for them."""
    modules = [name for name in ("httpx", "torch") if importlib.util.find_spec(name)]
    choices = {
        f"user {NOBODY}": ["--user", str(NOBODY)],
        "the same user, root, without capabilities": ["--no-capabilities"],
    }
    if os.getuid():
        choices = {"the same user, not root": ["--no-capabilities"]}
    for name, options in choices.items():
        probe = isolation.command(*options, command=[sys.executable, "-c", PROBE, str(file), *modules])
        if subprocess.run(probe, capture_output=True, cwd="/", check=False).returncode == 0:
            return options, name
    return [], "the same user: this system lets nothing go"


def hand_over(uid: int, *folders: Path) -> None:
    """Let folders and all in them belong to a user and the group of the same number."""
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


def snapshot(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file under a folder, by name; a folder in it stands there by its name."""
    folders = {f"{path.relative_to(folder).as_posix()}/": "" for path in folder.rglob("*") if path.is_dir()}
    return folders | {name: sha256_file(folder / name) for name in files_under(folder)}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names added to, changed in or gone from a folder between two snapshots."""
    return sorted(name for name in before | after if before.get(name) != after.get(name))


if __name__ == "__main__":
    raise SystemExit(main())
