"""A submission run as the grader runs it: started, asked over TCP, stopped, and looked at again.

Usage: python -m stages.rehearsal.scenes PLAN.json RESULT.json (selfcheck writes the one and reads the other).

Where the system allows it the server and this client are alone on a network without an outside, and the
server has another user, or at least no capabilities. What was possible is in the result.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter.replay import Conversation, read_conversations
from stages.files import files_under, sha256_file, write_json
from stages.rehearsal import isolation
from stages.rehearsal.client import Terms, replay_http
from stages.rehearsal.server import SceneError, Server

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

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
        sets: names and files of the conversations to replay, in this order.
        terms: how the grader asks.
        start_timeout_s: time until /health must answer 200.
        stop_timeout_s: time from SIGTERM until nothing of the server may be left.
    """

    submission: Path
    scratch: Path
    sets: tuple[tuple[str, Path], ...]
    terms: Terms
    start_timeout_s: float
    stop_timeout_s: float = 20.0

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Plan":
        """Read a plan from plain values."""
        sets = tuple((name, Path(path)) for name, path in row["sets"])
        places = {"submission": Path(row["submission"]), "scratch": Path(row["scratch"])}
        return cls(**row | places | {"sets": sets, "terms": Terms(**row["terms"])})


def rehearse(plan: Plan) -> dict[str, Any]:
    """Rehearse in a process of its own, without a network where that can be had; return what was seen.

    Returns:
        `stage`: the last stage reached (start, smoke, replay, stop); `reason`: why it went no further;
        `environment`; `start_s`; `smoke`; `sets`: counts and steps of each replay; `health`: the status
        after them; `stop`; `changed`: names added to, changed in or gone from the submission; `log_tail`.
        Keys of stages that were not reached are missing.
    """
    request, answer = plan.scratch / "plan.json", plan.scratch / "result.json"
    write_json(request, json.loads(json.dumps(asdict(plan), default=str)))
    command = [sys.executable, "-m", "stages.rehearsal.scenes", str(request), str(answer)]
    subprocess.run(isolation.command("--no-network", command=command), check=True, cwd=ROOT)
    return json.loads(answer.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    """Rehearse what PLAN.json says, here and now, and write what was seen to RESULT.json."""
    request, answer = (Path(name) for name in (sys.argv[1:] if argv is None else argv))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    write_json(answer, _rehearse(Plan.from_json(json.loads(request.read_text(encoding="utf-8")))))
    return 0


def _rehearse(plan: Plan) -> dict[str, Any]:
    isolate, user = lesser_user(plan.submission / "serve.sh")
    folders = [plan.scratch / "home", plan.scratch / "tmp"]
    for folder in folders:
        folder.mkdir()
    if "--user" in isolate:
        _hand_over(NOBODY, plan.submission, *folders)
    before = snapshot(plan.submission)
    seen: dict[str, Any] = {
        "stage": "start", "reason": None, "sets": {},
        "environment": {"network": os.environ.get(isolation.NETWORK, "open: not asked for"), "user": user},
    }
    with Server(plan.submission, plan.scratch, isolate) as server:
        try:
            _scenes(plan, server, seen)
        except SceneError as error:
            seen["reason"] = str(error)
        seen["stop"] = server.stop(plan.stop_timeout_s)
    after = snapshot(plan.submission)
    seen["changed"] = sorted(name for name in before | after if before.get(name) != after.get(name))
    seen["log_tail"] = server.log_tail()
    return seen


def _scenes(plan: Plan, server: Server, seen: dict[str, Any]) -> None:
    sets = {name: read_conversations(path) for name, path in plan.sets}
    seen["start_s"] = round(server.wait_until_healthy(plan.start_timeout_s), 3)
    seen["stage"] = "smoke"
    first = next(iter(sets.values()))[0]
    seen["smoke"] = server.smoke(list(first.prompt), plan.terms.request_timeout_s)
    seen["stage"] = "replay"
    for name, conversations in sets.items():
        seen["sets"][name] = _replay(name, conversations, server.url, plan.terms)
    seen["health"] = server.health()
    seen["stage"] = "stop"


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


def _hand_over(uid: int, *folders: Path) -> None:
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


def snapshot(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file under a folder, by name; a folder in it stands there by its name."""
    folders = {f"{path.relative_to(folder).as_posix()}/": "" for path in folder.rglob("*") if path.is_dir()}
    return folders | {name: sha256_file(folder / name) for name in files_under(folder)}


if __name__ == "__main__":
    raise SystemExit(main())
