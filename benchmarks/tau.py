"""Tau per byte: every codec as a real packed file of the same size, trained for the same GPU-seconds.

    make bench-tau SECONDS=1500         (needs the target and what `make teacher PROFILE=smollm2-gpu` leaves)

A worker on each GPU takes arms from one list, the most telling first; benchmarks/bench.py says how they go.
All layers are the target itself: not distilled, and reported beside the others. One line of JSON an arm is
written as it ends; said again, the command goes on with the arms that are missing, and a second one beside it
takes part.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.arms import SETS, Arm, arm_of, told
from benchmarks.bench import run_worker
from benchmarks.comparison import compared, ratio
from benchmarks.machine import machine, write_results
from benchmarks.workers import Line, Lines, latest, line_of, parser_of, run_workers
from stages.errors import UserError
from stages.profile import load_profile

GAIN = 0.01  # a doubling that gains less ends an arm's doublings
OVERHEAD_S = 40.0  # of an arm: compiling, timing a step, planning, packing, judging

Drafters = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """Which arms, in order of what they tell; the two best go on to another seed and to doublings."""

    sizes: tuple[int, int, int] = (31_910_000, 22_000_000, 16_000_000)  # int4 g32 of 8 layers, and less
    seconds: float = 60.0
    first: Drafters = (("int4 g32", 8), ("entropy", 24), ("entropy", 20), ("int4 g64 clipped", 8),
                       ("entropy", 16))  # fmt: skip
    rest: Drafters = (("int4 g32 clipped", 8), ("entropy by row rms", 24), ("entropy", 30), ("entropy", 12),
                      ("nf4 g64 + rank 32", 6), ("entropy by half Fisher", 24),
                      ("int4 g32 clipped, half the rate", 8))  # fmt: skip
    second: Drafters = (("int4 g32", 3), ("entropy", 24), ("entropy", 20), ("entropy", 30))
    third: Drafters = (("entropy", 20), ("entropy", 24), ("entropy", 30))
    over: tuple[str, int, int] = ("int4 g32", 12, 39_900_000)  # what would not fit, with a quarter more bytes
    target_layers: int = 30
    seeds: int = 2
    doublings: int = 3

    def arms(self, lines: Sequence[Line]) -> Iterator[Arm]:
        """Yield all arms that can be told from the lines so far, those that have one included."""
        first = [Arm(codec, layers, self.sizes[0], self.seconds) for codec, layers in self.first]
        yield from first
        known = [line for arm in first if (line := line_of(asdict(arm), lines))]
        # One of the first may have failed, or be under way still.
        enough = len(known) >= len(first) - 1
        best = leaders(self.rivals(lines, self.sizes[0], self.seconds), self.target_layers) if enough else []
        for line in best:
            yield from (replace(arm_of(line), seed=seed) for seed in range(1, self.seeds))
        yield from (Arm(codec, layers, self.sizes[0], self.seconds) for codec, layers in self.rest)
        for size, drafters in zip(self.sizes[1:], (self.second, self.third), strict=True):
            yield from (Arm(codec, layers, size, self.seconds) for codec, layers in drafters)
        yield Arm(*self.over, self.seconds)
        for line in best:
            yield from self._longer(line, lines)

    def rivals(self, lines: Iterable[Line], size_bytes: int, seconds: float) -> list[Line]:
        """Return the lines of one size and time, of the first seed."""
        return [one for one in lines if one["size_bytes"] == size_bytes and one["seconds"] == seconds
                and one["seed"] == 0]  # fmt: skip

    def _longer(self, line: Line, lines: Sequence[Line]) -> Iterator[Arm]:
        for _ in range(self.doublings):
            arm = replace(arm_of(line), seconds=2 * line["seconds"])
            yield arm
            longer = line_of(asdict(arm), lines)
            if longer is None or longer["tau_b"]["tau"] < (1 + GAIN) * line["tau_b"]["tau"]:
                return
            line = longer


def leaders(lines: Sequence[Line], target_layers: int) -> list[Line]:
    """Return the best entropy-coded arm that is not the target itself, and the best int4 arm, by (b)."""
    kinds = ([one for one in lines if one["codec"] == "entropy" and one["layers"] < target_layers],
             [one for one in lines if one["codec"].startswith("int4")])  # fmt: skip
    return [max(kind, key=lambda one: one["tau_b"]["tau"]) for kind in kinds if kind]


def report(lines: list[Line], plan: Plan) -> list[dict[str, Any]]:
    """Print and return ratios at equal bytes and seconds: best entropy over best int4, Fisher over rms."""
    found = []
    for size in plan.sizes:
        for seconds in sorted({line["seconds"] for line in lines}):
            same = plan.rivals(lines, size, seconds)
            best = leaders(same, plan.target_layers)
            pairs = [(best[0], best[1])] if len(best) == 2 else []
            pairs += [(one, other) for other in same if other["codec"] == "entropy by row rms" for one in same
                      if one["codec"] == "entropy" and one["layers"] == other["layers"]]  # fmt: skip
            for one, other in pairs:
                found.append(_ratios(one, other, lines))
                print(f"{size:,} bytes, {seconds:g} s: {found[-1]['text']}", flush=True)
    return found


def _ratios(one: Line, other: Line, lines: list[Line]) -> dict[str, Any]:
    """Compare two arms over the seeds that both have."""
    seeds = sorted(_seeds(one, lines).keys() & _seeds(other, lines).keys())
    both = [[_seeds(arm, lines)[seed] for seed in seeds] for arm in (one, other)]
    ratios = {}
    for name in SETS:
        counts = [[line[f"counts_{name}"] for line in side] for side in both]
        ratios[name] = compared(counts[0], counts[1], ratio)
    text = ", ".join(f"({name}) {middle:.3f} ({low:.3f} to {high:.3f})"
                     for name, (middle, low, high) in ratios.items())  # fmt: skip
    names = " over ".join(f"{line['codec']} x {line['layers']}" for line in (one, other))
    return {"of": asdict(arm_of(one)), "over": asdict(arm_of(other)), "seeds": seeds, **ratios,
            "text": f"{names}, {len(seeds)} seeds: {text}"}  # fmt: skip


def _seeds(line: Line, lines: list[Line]) -> dict[int, Line]:
    own = asdict(arm_of(line)) | {"seed": None}
    return {one["seed"]: one for one in lines if asdict(arm_of(one)) | {"seed": None} == own}


def room(_found: list[Line], arm: Arm, ends: float) -> bool:
    """Say whether an arm may end in time."""
    return time.time() + arm.seconds + OVERHEAD_S < ends


def main(argv: list[str] | None = None) -> int:
    """Run the arms, report, and write benchmarks/results/tau-DEVICE.json."""
    parser = parser_of("python -m benchmarks.tau", __doc__, "tau.jsonl")
    parser.add_argument("--arm-seconds", type=float, default=Plan.seconds, help="of training for each arm")
    parser.add_argument("--plan", type=json.loads, default={}, help="changes to the plan, as JSON")
    given = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(given)
    drafters = ("first", "rest", "second", "third")
    changed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                               for name, value in options.plan.items()}  # fmt: skip
    changed |= {name: tuple(map(tuple, changed[name])) for name in drafters if name in changed}
    plan = replace(Plan(seconds=options.arm_seconds), **changed)
    try:
        if options.cores:
            profile = load_profile(options.profile, options.root / "profiles")
            return run_worker(options, profile, plan.arms, room)
        failed = run_workers("benchmarks.tau", given, options.seconds)
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    lines = latest(Lines(options.lines).read())
    for line in lines:
        print(told(line))
    ratios = report(lines, plan)
    write_results("tau", machine("make bench-tau") | {"arms": lines, "ratios": ratios})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
