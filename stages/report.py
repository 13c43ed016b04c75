"""What was built: tau against its baselines, bytes against the limit, gates, and the time of each stage.

Usage: python -m stages.report [--profile NAME] [--json]
Exit code 0; 2 where nothing has been built yet. It only reads; `make selfcheck` measures.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from stages import pace
from stages.display import console
from stages.errors import UserError
from stages.fidelity import told
from stages.files import digest_of, sha256_file
from stages.profile import Limits, Profile, load_profile
from stages.rehearsal.gates import Gate, gate_table
from stages.size import survey, table
from stages.wrapper.declaration import read_declarations
from stages.wrapper.record import read_record, run_of

ROOT = Path(__file__).resolve().parent.parent
SELFCHECK = "selfcheck-report.json"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Print the report of a profile; return 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m stages.report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2",
                        help="profiles/NAME.toml (default: $PROFILE, else smollm2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile, root / "profiles")
        report = gather(root, profile)
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, sort_keys=True, indent=1, ensure_ascii=False))
    else:
        show(report, profile.limits, root / "output")
    return 0


def gather(root: Path, profile: Profile) -> dict[str, Any]:
    """Collect what the records and the last selfcheck say.

    Returns:
        `profile`; `stages`: facts of each stage that has a record; `selfcheck`: its report, or None;
        `untouched`: the simulated tau on dev of the start before any training, or None; `notes`: sentences
        about what is missing or does not belong together.

    Raises:
        UserError: the profile has no record at all.
    """
    records = {stage: read_record(root, profile.name, stage) for stage in read_declarations(root)}
    runs = {stage: run_of(record) for stage, record in records.items() if record}
    if not runs:
        raise UserError(f"profile {profile.name}: nothing was built yet. Run make all PROFILE={profile.name}")
    missing = [stage for stage in records if stage not in runs]
    path = root / "logs" / profile.name / SELFCHECK
    checked = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    keys = ("seconds", "runner", "locked", "started", "threads", "cpu", "metrics")
    return {
        "profile": profile.name,
        "stages": {stage: {key: run.get(key) for key in keys} for stage, run in runs.items()},
        "selfcheck": checked,
        "untouched": (runs.get("distill", {}).get("metrics") or {}).get("tau_dev_before"),
        "notes": list(_notes(missing, checked, root / "output")),
    }


def _notes(missing: list[str], checked: dict[str, Any] | None, output: Path) -> Iterator[str]:
    if missing:
        yield f"without a record: {', '.join(missing)}; make all carries on"
    if checked is None:
        yield "no selfcheck yet, so no tau: make selfcheck"
    elif not output.is_dir():
        yield "output/ is gone; the selfcheck below is of what it was"
    elif checked["files_sha256"] != _digest(output):
        yield "output/ has changed since this selfcheck (or is another profile's): make selfcheck"


def _digest(output: Path) -> str:
    return digest_of({file.name: sha256_file(file.path) for file in survey(output).files})


def show(report: dict[str, Any], limits: Limits, output: Path) -> None:
    """Print the report as tables."""
    screen = console()
    screen.print(times(report["stages"]))
    written = (report["stages"].get("teacher") or {}).get("metrics") or {}
    if written.get("categories"):
        screen.print(continuations(written))
    for number, run in enumerate(written.get("runs", ()), 1):
        screen.print(escape(f"the teacher's run {number} of {len(written['runs'])}: {pace.told(run)}, by "
                            f"{run['ranks']} rank{'s' * (run['ranks'] > 1)}"))
    for name, fidelity in written.get("fidelity", {}).items():
        screen.print(escape(told(name, fidelity)))
    if output.is_dir():
        screen.print(table(survey(output), limits))
    checked = report["selfcheck"]
    if checked:
        screen.print(gate_table(Gate(**gate) for gate in checked["gates"]))
        environment = ", ".join(f"{name}: {text}" for name, text in sorted(checked["environment"].items()))
        screen.print(escape(f"rehearsed with {environment}") if environment else "not rehearsed")
        if checked["tau"]:
            screen.print(standings(checked, report["untouched"]))
            screen.print(by_category(checked["tau"]))
            screen.print(by_position(checked["tau"]))
    for note in report["notes"]:
        screen.print(f"[yellow]{escape(note)}")


def _sheet(title: str, *columns: str, text_columns: int = 1) -> Table:
    sheet = Table(*columns, title=title)
    for column in sheet.columns[text_columns:]:
        column.justify = "right"
    return sheet


def times(stages: dict[str, Any]) -> Table:
    """Return the time of each stage."""
    sheet = _sheet("stages", "stage", "started", "ran in", "seconds", text_columns=3)
    for stage, run in stages.items():
        place = run["runner"] if run["locked"] else f"{run['runner']}, unlocked"
        sheet.add_row(stage, str(run["started"]), str(place), f"{run['seconds']:,.1f}")
    sheet.add_section()
    sheet.add_row("all", "", "", f"{sum(run['seconds'] for run in stages.values()):,.1f}")
    return sheet


def continuations(written: dict[str, Any]) -> Table:
    """Return what the teacher's continuations are like, in each category and in all."""
    sheet = _sheet("what the teacher wrote", "category", "rows", "tokens", "ended by a stop id", "loops",
                   "mean top-1 probability", "tokens of each: rows")
    for name, part in [*written["categories"].items(), ("all", written)]:
        if name == "all":
            sheet.add_section()
        shares = [f"{part[key]:.1%}" for key in ("stop_share", "loop_share")]
        by_length = sorted(part["lengths"].items(), key=lambda one: int(one[0].partition("-")[0]))
        lengths = ", ".join(f"{label}: {rows:,}" for label, rows in by_length)
        sheet.add_row(name, f"{part['rows']:,}", f"{part['tokens']:,}", *shares,
                      f"{part['mean_top1_probability']:.3f}", lengths)
    return sheet


def standings(checked: dict[str, Any], untouched: float | None) -> Table:
    """Return tau of the drafter and its baselines on each set, and what the drafter is ahead by."""
    sheet = _sheet("tau (95% intervals over conversations)", "set", "drafter", "tau", "interval", "macro",
                   "tokens", "steps", "ahead by", "interval", text_columns=2)
    for name, tau in sorted(checked["tau"].items()):
        sheet.add_section()
        sheet.add_row(name, "[bold]served", *_tau(tau), "", "")
        for baseline, row in sorted(checked["baselines"][name].items()):
            ahead = row["difference"]
            sheet.add_row("", baseline, *_tau(row), f"{ahead['difference']:+.3f}", _interval(ahead))
        if name == "dev" and untouched is not None:
            sheet.add_row("", "untrained, simulated", f"{untouched:.3f}", "", "", "", "", "", "")
    return sheet


def _tau(row: dict[str, Any]) -> list[str]:
    counts = [f"{row[key]:,}" for key in ("tokens", "steps")]
    return [f"{row['tau']:.3f}", _interval(row), f"{row['macro']:.3f}", *counts]


def _interval(row: dict[str, Any]) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}"


def by_category(tau: dict[str, Any]) -> Table:
    """Return tau within each category."""
    names = sorted({category for row in tau.values() for category in row["categories"]})
    sheet = _sheet("tau by category", "category", *sorted(tau))
    for category in names:
        cells = (tau[name]["categories"].get(category) for name in sorted(tau))
        sheet.add_row(category, *("" if value is None else f"{value:.3f}" for value in cells))
    return sheet


def by_position(tau: dict[str, Any]) -> Table:
    """Return, for each draft position, the share of the steps that reached it which accepted it."""
    sheet = _sheet("acceptance by draft position", "position",
                   *(text for name in sorted(tau) for text in (name, "steps that reached it")))
    rows = {name: tau[name]["positions"] for name in sorted(tau)}
    for index in range(max(map(len, rows.values()))):
        cells = []
        for positions in rows.values():
            here = positions[index] if index < len(positions) else None
            cells += [f"{here['share']:.3f}", f"{here['reached']:,}"] if here else ["", ""]
        sheet.add_row(str(index + 1), *cells)
    return sheet


if __name__ == "__main__":
    raise SystemExit(main())
