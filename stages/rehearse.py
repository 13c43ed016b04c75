"""Rehearse the grader on a submission by hand: the gates of `make selfcheck`, without a record.

    python -m stages.rehearse                    output/
    python -m stages.rehearse FOLDER --quick     any submission; only the openings of the examples

Exit code 0: every gate passed; 1: one failed; 2: there is nothing to rehearse, or nothing to do it with.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from stages.display import console
from stages.errors import UserError
from stages.profile import load_profile
from stages.rehearsal.gates import Gate, gate_table
from stages.selfcheck import Rehearsal, check, failures
from stages.wrapper.choice import RUNNERS, choose_runner

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Rehearse a folder and print its gates; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.rehearse", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=root / "output")
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2",
                        help="whose limits and examples (default: $PROFILE, else smollm2)")
    parser.add_argument("--runner", default=os.environ.get("RUNNER") or "",
                        help=f"where: {', '.join(RUNNERS)} (default: $RUNNER, else as make all chooses)")
    parser.add_argument("--quick", action="store_true", help="only the openings of the examples")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile, root / "profiles")
        runner, _ = choose_runner(root, options.runner)
        teacher = root / "build" / profile.name / "teacher"
        if not (teacher / "examples.jsonl").is_file():
            name = profile.name
            raise UserError(f"profile {name} has no examples yet: make teacher PROFILE={name}")
        report = check(Rehearsal(options.folder.resolve(), teacher, root, profile.limits, profile.selfcheck,
                                 runner.name, profile.device, options.quick))
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, sort_keys=True, indent=1, ensure_ascii=False))
    else:
        console().print(gate_table(Gate(**gate) for gate in report["gates"]))
    for sentence in failures(report):
        print(f"draftmill: {sentence}", file=sys.stderr)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
