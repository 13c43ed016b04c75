"""The submission as the grader and its reviewer will find it: gates, and where its tau stands.

Tau is reported and never a gate: the examples are not for choosing.
"""

import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.replay import read_conversations
from stages.display import console
from stages.errors import UserError
from stages.files import digest_of, sha256_file, write_json
from stages.job import Job
from stages.profile import Limits, Selfcheck
from stages.rehearsal.client import Terms
from stages.rehearsal.gates import (
    GRADED,
    STOP_TIMEOUT_S,
    WINDOWS,
    Gate,
    gate_table,
    rehearsal_gates,
    static_gates,
)
from stages.rehearsal.projection import windows_save_time
from stages.rehearsal.scenes import Plan, rehearse
from stages.rehearsal.standing import standing
from stages.rehearsal.twin import Twin, rehearse_in_twin
from stages.size import Survey, survey
from stages.upstream.grader import shipped
from stages.upstream.pins import read_pins
from stages.wrapper.engine import ENGINES

SECTIONS = ("limits", "selfcheck")
TAKES = ("pack", "teacher/train-*", "teacher/dev.jsonl", "teacher/examples.jsonl")
FILES = ("lock/serve.txt",)
LIBRARIES = ("httpx", "numpy", "safetensors", "torch")
CONDUCTS = True

DEV = "dev"
Replays = tuple[tuple[str, str, str], ...]
WHOLE: Replays = ((GRADED, GRADED, "whole"), (DEV, DEV, "whole"))
PROJECTED: Replays = ((WINDOWS, GRADED, "windows"), *WHOLE)
QUICK: Replays = ((GRADED, GRADED, "openings"),)


@dataclass(frozen=True)
class Rehearsal:
    """What is rehearsed, and where.

    Attributes:
        submission: the folder to check.
        teacher: the folder of the teacher's examples, dev set and training shards.
        root: the repository.
        runner: docker and podman rehearse in the grader's twin, any other on this machine.
        device: 'cpu' or 'cuda'.
        quick: replay only the openings of the examples.
    """

    submission: Path
    teacher: Path
    root: Path
    limits: Limits
    rules: Selfcheck
    runner: str
    device: str
    quick: bool = False


def run(job: Job) -> dict[str, object]:
    """Check the submission; leave report.json; return the figures that the record keeps.

    The report is also left in the log folder, where it can be read when a gate has failed.

    Raises:
        UserError: a gate failed; the text names each with what was seen.
    """
    report = check(Rehearsal(job.inputs["pack"], job.inputs["teacher"], job.root, job.config.limits,
                             job.config.selfcheck, job.runner, job.device))
    write_json(job.out / "report.json", report)
    write_json(job.log.parent / "selfcheck-report.json", report)
    console(stderr=True).print(gate_table(Gate(**gate) for gate in report["gates"]))
    if failed := failures(report):
        raise UserError("the submission does not pass. " + "\n  ".join(["Failed gates:", *failed]))
    return _metrics(report)


def check(what: Rehearsal) -> dict[str, Any]:
    """Judge the files, rehearse if they pass, and return the report.

    Raises:
        UserError: there is no such folder, or no image for the twin.
    """
    replays = QUICK if what.quick else _replays(what.teacher)
    sets = {name: what.teacher / f"{name}.jsonl" for name in dict.fromkeys(of for _, of, _ in replays)}
    found = survey(what.submission)
    gates = static_gates(found, what.limits, shipped(read_pins(what.root / "lock" / "serve.txt")))
    seen = None
    if all(gate.passed for gate in gates):
        seen = _rehearse(found, sets, replays, what)
    gates += rehearsal_gates(seen, what.rules)
    report = _report(found, gates, seen or {}, what)
    if not what.quick:
        report |= standing(sets, (seen or {}).get("sets", {}), what.teacher)
    return report


def _replays(teacher: Path) -> Replays:
    examples = read_conversations(teacher / f"{GRADED}.jsonl")
    return PROJECTED if windows_save_time(examples) else WHOLE


def failures(report: dict[str, Any]) -> list[str]:
    """Return a sentence for each gate that failed."""
    return [f"{gate['name']}: {gate['text']}" for gate in report["gates"] if gate["passed"] is False]


def _rehearse(found: Survey, sets: dict[str, Path], replays: Replays, what: Rehearsal) -> dict[str, Any]:
    rules = what.rules
    terms = Terms(rules.in_flight, rules.request_timeout_s, rules.retries, rules.budget_s)
    with _scratch() as scratch:
        submission, own = scratch / "submission", scratch / "run"
        copy_like_the_grader(found, submission)
        own.mkdir()
        own.chmod(0o755)
        plan = Plan(submission, own, tuple(sets.items()), replays, terms, rules.start_timeout_s,
                    STOP_TIMEOUT_S)
        if what.runner in ENGINES:
            return rehearse_in_twin(plan, Twin.find(what.root, what.runner, what.device == "cuda"))
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


def _report(found: Survey, gates: list[Gate], seen: dict[str, Any], what: Rehearsal) -> dict[str, Any]:
    replays = {name: {key: value for key, value in replay.items() if key != "steps"}
               for name, replay in seen.get("sets", {}).items()}
    return {
        "passed": all(gate.passed for gate in gates),
        "quick": what.quick,
        "stage_reached": seen.get("stage", "files"),
        "gates": [gate.to_json() for gate in gates],
        "files_sha256": digest_of({file.name: sha256_file(file.path) for file in found.files}),
        "bytes": found.by_component(),
        "device": _device(what.device),
        "environment": seen.get("environment", {}),
        "replays": replays,
        "server_log": seen.get("log_tail", []),
    }


def _device(kind: str) -> str:
    """Return the name of the GPU, or of the processor where none is used or there."""
    if kind == "cuda":
        import torch  # noqa: PLC0415 (only a GPU's name needs it)

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name(0))
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _metrics(report: dict[str, Any]) -> dict[str, object]:
    tau = {name: {key: row[key] for key in ("tau", "low", "high", "tokens", "steps")}
           for name, row in report["tau"].items()}
    return {"tau": tau, "files_sha256": report["files_sha256"], "bytes": sum(report["bytes"].values())}
