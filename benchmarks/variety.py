"""What each source of prompts is worth: one recipe on templates alone, on all, and with each source left out.

    make bench-variety SECONDS=1500     (needs the target and what `make teacher PROFILE=smollm2-gpu` leaves)

Every arm is the profile's own recipe cut to `--steps` steps of as many tokens: a fifth of them distils, the
rest trains through the codec. Where a source is left out, as many rows are drawn from the others as "all"
draws. Tau is simulated on (a) rows held out of all sources and (b) the dev conversations of another hand,
with the paired difference to "all"; prompt lookup and a trigram table stand beside it. A worker on each GPU
takes arms from one list, as in benchmarks/tau.py; no arm is begun that the time left would cut off.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.arms import SETS, Arm, told
from benchmarks.bench import run_worker
from benchmarks.comparison import compared, difference, ratio
from benchmarks.machine import machine, write_results
from benchmarks.workers import Line, Lines, latest, parser_of, run_workers
from drafter.replay import Steps, read_conversations, replay_offline, summary
from stages.errors import UserError
from stages.profile import Profile, load_profile
from stages.rehearsal.baselines import prompt_lookup, trigrams_of

STEPS = 300


def arms(profile: Profile, steps: int, seeds: int) -> Iterator[Arm]:
    """Yield the arms, the most telling first."""
    sources = [source.id for source in profile.data.sources]
    templates = [source.id for source in profile.data.sources if source.kind == "template"]
    names = ["all", *(f"only {one}" for one in templates), *(f"all but {one}" for one in sources)]
    layers, size = len(profile.start.layers), profile.limits.allotment_bytes
    for seed in range(seeds):
        for name in names:
            yield Arm("the profile's", layers, size, steps=steps, seed=seed, sources=name)


def baselines(root: Any, profile: Profile) -> dict[str, Any]:
    """Return tau of what knows next to nothing, on both sets."""
    teacher = root / "build" / profile.name / "teacher"
    drafts = {"prompt lookup": prompt_lookup, "trigram table": trigrams_of(teacher).draft}
    found: dict[str, Any] = {}
    for name, file in SETS.items():
        conversations = read_conversations(teacher / f"{file}.jsonl")
        for kind, draft in drafts.items():
            steps: list[Steps] = [replay_offline(one, draft) for one in conversations]
            tau = summary(conversations, steps)
            found[f"{kind} ({name})"] = {"tau": tau.tau, "low": tau.low, "high": tau.high}
    return found


def report(lines: list[Line]) -> list[dict[str, Any]]:
    """Print and return each arm's tau, less that of "all" and over that of one source alone, paired."""
    found = []
    for line in lines:
        print(told(line))
        for other in lines:
            alone = line["sources"] == "all" and other["sources"].startswith("only")
            alike = all(other[name] == line[name] for name in ("seed", "steps"))
            if not alike or not (alone or "all" == other["sources"] != line["sources"]):
                continue
            how = ratio if alone else difference
            sides = {name: compared([line[f"counts_{name}"]], [other[f"counts_{name}"]], how)
                     for name in SETS}  # fmt: skip
            found.append({"of": line["sources"], "and": other["sources"], "how": how.__name__,
                          "seed": line["seed"], "steps": line["steps"], **sides})  # fmt: skip
            print(f"    {how.__name__} to {other['sources']}: " + ", ".join(
                f"({name}) {middle:.3f} ({low:.3f} to {high:.3f})"
                for name, (middle, low, high) in sides.items()))  # fmt: skip
    return found


def room(found: list[Line], arm: Arm, ends: float) -> bool:
    """Say whether an arm may end in time, if it takes as long as the longest yet of as many steps."""
    known = (line["wall_s"] for line in found if line["steps"] == arm.steps)
    return time.time() + max(known, default=0.0) < ends


def main(argv: list[str] | None = None) -> int:
    """Run the arms, report, and write benchmarks/results/variety-DEVICE.json."""
    parser = parser_of("python -m benchmarks.variety", __doc__, "variety.jsonl")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training an arm (default {STEPS})")
    parser.add_argument("--seeds", type=int, default=1, help="of each arm (default 1)")
    given = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(given)
    try:
        profile = load_profile(options.profile, options.root / "profiles")
        chosen = list(arms(profile, options.steps, options.seeds))
        if options.cores:
            return run_worker(options, profile, lambda _: chosen, room)
        failed = run_workers("benchmarks.variety", given, options.seconds)
        beside = baselines(options.root, profile)
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    found = latest(Lines(options.lines).read())
    compared_arms = report(found)
    for name, tau in beside.items():
        print(f"{name}: {tau['tau']:.3f} ({tau['low']:.3f} to {tau['high']:.3f})")
    write_results("variety", machine("make bench-variety") | {
        "arms": found, "compared": compared_arms, "baselines": beside})  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
