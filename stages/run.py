"""The front of every stage: decide by content whether it must run, and have it run.

    python -m stages.run distill --profile smollm2      this stage alone, on what upstream stages have left
    python -m stages.run distill --with-upstream        first what it rests on, where that is not up to date
    python -m stages.run all                            every stage
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from stages.errors import UserError
from stages.profile import Profile, load_profile
from stages.wrapper.choice import RUNNERS, choose_runner
from stages.wrapper.declaration import chain, read_declarations
from stages.wrapper.digests import Digests
from stages.wrapper.execution import Shop, StageFailedError, execute
from stages.wrapper.place import hold
from stages.wrapper.state import check_inputs, state_of
from stages.wrapper.voice import need_no_listener

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = "all"


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments name; return the exit code (2 for a mistake that the user can mend)."""
    options = _parser().parse_args(argv)
    try:
        return _main(options)
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    except StageFailedError as failure:
        return failure.code
    except KeyboardInterrupt:
        return 130


def ensure(shop: Shop, stage: str) -> None:
    """Run a stage unless its record has its key and its outputs hash right.

    Raises:
        UserError: its inputs are not there, or something declared does not fit.
        StageFailedError: its process failed.
    """
    state = state_of(shop.root, shop.profile, shop.declarations[stage], shop.digests)
    if state.definition is None:
        raise UserError(f"{stage}: {state.reason}")
    if state.reason:
        print(f"{stage}: runs, because {state.reason}", flush=True)
        check_inputs(shop.root, shop.profile.name, shop.declarations, state.definition, shop.digests)
        facts = execute(shop, stage, state.definition, state.key)
        place = shop.place(stage).relative_to(shop.root)
        print(f"{stage}: done in {facts['seconds']:.0f} s -> {place}/", flush=True)
    else:
        print(f"{stage}: up to date", flush=True)
    shop.digests.save()


def _main(options: argparse.Namespace) -> int:
    profile = load_profile(options.profile, ROOT / "profiles")
    runner, why = choose_runner(ROOT, options.runner)
    declarations = read_declarations(ROOT)
    if options.stage == EVERYTHING:
        stages = list(declarations)
        print("\n".join(_headlines(profile, runner.name, why)), flush=True)
    elif options.stage not in declarations:
        raise UserError(f"{options.stage}: there is no such stage. Stages: {', '.join(declarations)}")
    else:
        needed = chain(declarations, options.stage)
        stages = needed if options.with_upstream else [options.stage]
    with hold(ROOT):
        shop = Shop(ROOT, profile, runner, declarations, Digests(ROOT))
        for stage in stages:
            ensure(shop, stage)
    return 0


def _headlines(profile: Profile, runner: str, why: str) -> Iterator[str]:
    limits = profile.limits
    yield (f"draftmill: profile {profile.name}, limit {limits.limit_bytes:,} bytes "
           f"({limits.allotment_bytes:,} for weights), device {profile.device}, runner {runner}")
    if why:
        yield f"draftmill: {why}"
    if profile.device == "cpu" and shutil.which("nvidia-smi"):
        yield "draftmill: this machine has a GPU; the contest's job is PROFILE=qwen3-8b"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A stage runs if its definition (config, code, libraries, inputs; never times) or its\n"
               "outputs are not as its record in logs/PROFILE/STAGE.json says. `python -m stages.plan`\n"
               "shows this without running anything.")
    parser.add_argument("stage", help="a stage, or 'all'")
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2",
                        help="profiles/NAME.toml (default: $PROFILE, else smollm2)")
    parser.add_argument("--runner", default=os.environ.get("RUNNER") or "",
                        help=f"where it runs: {', '.join(RUNNERS)} (default: $RUNNER, else the first of the "
                             "engines that answers and has its images, else host)")
    parser.add_argument("--with-upstream", action="store_true", help="first run the stages that it rests on")
    return parser


if __name__ == "__main__":
    need_no_listener()
    sys.exit(main())
