"""The submission as the grader and its reviewer will find it: gates, and where its tau stands.

Tau is reported and never a gate: the examples are not for choosing.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.display import console
from stages.errors import UserError
from stages.files import digest_of, sha256_file, write_json
from stages.job import Job
from stages.profile import Selfcheck
from stages.rehearsal.client import Terms
from stages.rehearsal.gates import GRADED, STOP_TIMEOUT_S, Gate, gate_table, rehearsal_gates, static_gates
from stages.rehearsal.scenes import Plan, rehearse
from stages.rehearsal.standing import standing
from stages.size import Survey, survey

SECTIONS = ("limits", "selfcheck")
TAKES = ("pack", "teacher/train-*", "teacher/dev.jsonl", "teacher/examples.jsonl")
LIBRARIES = ("httpx", "numpy", "safetensors", "torch")

SETS = (GRADED, "dev")


def run(job: Job) -> dict[str, object]:
    """Check the submission; leave report.json; return the figures that the record keeps.

    The report is also left in the log folder, where it can be read when a gate has failed.

    Raises:
        UserError: a gate failed; the text names each with what was seen.
    """
    teacher = job.inputs["teacher"]
    sets = {name: teacher / f"{name}.jsonl" for name in SETS}
    found = survey(job.inputs["pack"])
    gates = static_gates(found, job.config.limits)
    seen = None
    if all(gate.passed for gate in gates):
        job.say(f"rehearsing {len(found.files)} files, {found.total_bytes:,} bytes")
        seen = _rehearse(found, sets, job.config.selfcheck)
    gates += rehearsal_gates(seen, job.config.selfcheck)
    report = _report(found, gates, seen or {})
    report |= standing(sets, (seen or {}).get("sets", {}), teacher)
    write_json(job.out / "report.json", report)
    write_json(job.log.parent / "selfcheck-report.json", report)
    console(stderr=True).print(gate_table(gates))
    failed = [f"{gate.name}: {gate.text}" for gate in gates if gate.passed is False]
    if failed:
        raise UserError("the submission does not pass. " + "\n  ".join(["Failed gates:", *failed]))
    return _metrics(report)


def _rehearse(found: Survey, sets: dict[str, Path], rules: Selfcheck) -> dict[str, Any]:
    terms = Terms(rules.in_flight, rules.request_timeout_s, rules.retries, rules.budget_s)
    with _scratch() as scratch:
        submission, own = scratch / "submission", scratch / "run"
        copy_like_the_grader(found, submission)
        own.mkdir()
        own.chmod(0o755)
        plan = Plan(submission, own, tuple(sets.items()), terms, rules.start_timeout_s, STOP_TIMEOUT_S)
        return rehearse(plan)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a temporary folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="draftmill-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def copy_like_the_grader(found: Survey, place: Path) -> None:
    """Copy a submission into a new folder as regular files, readable by all; links become their targets."""
    for file in found.files:
        copy = place / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, copy)
        copy.chmod(0o755 if file.path.stat().st_mode & 0o100 else 0o644)
    for folder in (place, *place.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o755)


def _report(found: Survey, gates: list[Gate], seen: dict[str, Any]) -> dict[str, Any]:
    replays = {name: {key: value for key, value in replay.items() if key != "steps"}
               for name, replay in seen.get("sets", {}).items()}
    return {
        "passed": all(gate.passed for gate in gates),
        "stage_reached": seen.get("stage", "files"),
        "gates": [gate.to_json() for gate in gates],
        "files_sha256": digest_of({file.name: sha256_file(file.path) for file in found.files}),
        "bytes": found.by_component(),
        "environment": seen.get("environment", {}),
        "replays": replays,
        "server_log": seen.get("log_tail", []),
    }


def _metrics(report: dict[str, Any]) -> dict[str, object]:
    tau = {name: {key: row[key] for key in ("tau", "low", "high", "tokens", "steps")}
           for name, row in report["tau"].items()}
    return {"tau": tau, "files_sha256": report["files_sha256"], "bytes": sum(report["bytes"].values())}
