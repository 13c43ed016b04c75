"""Say what each stage would do, take and leave, without running anything.

    python -m stages.plan --profile qwen3-8b
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.profile import Profile, load_profile
from stages.wrapper.declaration import Declaration, fill, read_declarations
from stages.wrapper.definition import config_of
from stages.wrapper.digests import Digests
from stages.wrapper.record import read_record
from stages.wrapper.state import state_of

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 110
LABEL = 10
LONGEST = 40


def main(argv: list[str] | None = None) -> int:
    """Print the plan of a profile; return 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m stages.plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile, ROOT / "profiles")
        print("\n".join(plan(ROOT, profile)))
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    return 0


def plan(root: Path, profile: Profile) -> Iterator[str]:
    """Yield the lines of the plan.

    Raises:
        UserError: a declaration and the profile do not fit together.
    """
    limits, digests = profile.limits, Digests(root)
    yield f"profile {profile.name}: {profile.target.name} @ {profile.target.revision}"
    yield (f"device {profile.device}, seed {profile.seed}, limit {limits.limit_bytes:,} bytes, "
           f"of which {limits.allotment_bytes:,} for weights")
    open_stages: set[str] = set()
    for stage, declaration in read_declarations(root).items():
        config = config_of(profile, declaration)
        key, standing = _standing(root, profile, declaration, digests, open_stages)
        taken = ", ".join(_taken(root, profile, declaration, config, open_stages))
        place = declaration.folder(root, profile.name).relative_to(root)
        yield ""
        yield f"{stage}: {declaration.summary.removeprefix(f'{stage}: ')}"
        yield from _item("config", "; ".join(_short(config)) or "nothing of the profile")
        yield from _item("takes", taken or "nothing")
        if declaration.reaches and (reached := getattr(profile, declaration.reaches).addresses):
            yield from _item("reaches", ", ".join(reached))
        yield from _item("leaves", f"{place}/")
        yield from _item("key", key or "not known before what it takes is there")
        yield from _item("state", standing)
        if standing != "up to date":
            open_stages.add(stage)


def _standing(root: Path, profile: Profile, declaration: Declaration, digests: Digests,
              open_stages: set[str]) -> tuple[str, str]:
    try:
        state = state_of(root, profile, declaration, digests)
    except UserError as error:
        return "", f"cannot run: {error}"
    if state.definition is None:
        return "", f"waits: {state.reason}"
    if state.reason:
        return state.key, f"would run, because {state.reason}"
    upstream = [name for name in declaration.upstream if name in open_stages]
    if upstream:
        return state.key, f"up to date, unless {' or '.join(upstream)} leaves something else"
    return state.key, "up to date"


def _taken(root: Path, profile: Profile, declaration: Declaration, config: dict[str, Any],
           open_stages: set[str]) -> Iterator[str]:
    for pattern in declaration.takes:
        for filled in fill(pattern, config):
            stage = filled.partition("/")[0]
            missing = read_record(root, profile.name, stage) is None
            yield f"{filled} ({'missing' if missing else 'stale' if stage in open_stages else 'fresh'})"
    for pattern in declaration.files:
        yield from fill(pattern, config)


def _short(config: dict[str, Any]) -> Iterator[str]:
    for section, value in config.items():
        if isinstance(value, dict):
            told = {name: item for name, item in value.items() if item not in (None, {}, [])}
            yield f"{section}: {', '.join(f'{name} {_value(item)}' for name, item in told.items())}"
        else:
            yield f"{section}: {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} ({', '.join(str(item.get('id', '?')) for item in value)})"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _item(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<{LABEL}}",
                         subsequent_indent=" " * (LABEL + 2), break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
