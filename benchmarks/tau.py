"""Tau per byte: every codec as a real packed file of the same size, trained for the same GPU-seconds.

    make bench-tau SECONDS=1500         (needs the target and what `make teacher PROFILE=smollm2-gpu` leaves)

Each arm keeps the layers of largest block influence, is distilled for a fifth of its seconds and trained
through its codec for the rest (the first step of each, which compiles, is not counted), packed, read back and
judged on (a) rows held out of the training sources and (b) the dev conversations of another hand. All layers
are the target itself: not distilled, and reported beside the others. One line of JSON an arm is written as it
ends; said again, the command goes on with the arms that are missing.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import machine, write_results
from drafter import weights
from drafter.config import ModelConfig
from drafter.model import causal, rotary_tables
from drafter.replay import Conversation, Steps, read_conversations, simulate, summary
from stages.distill import prune
from stages.files import digest_of
from stages.job import Job
from stages.models.target import load_target, read_model
from stages.profile import Distill, Limits, Profile, Qat, load_profile
from stages.qat import Drafter, Quantiser
from stages.training.batches import collate
from stages.training.network import Network
from stages.training.rows import Row, Rows, read_rows
from stages.training.trainer import Trainer
from stages.wrapper.code import code_digests

ROOT = Path(__file__).resolve().parent.parent
DISTILL_SHARE = 0.2
MEASURED_STEPS = 24  # of a short run that tells how long a step takes
GAIN = 0.01  # a doubling that gains less ends an arm's doublings
INFLUENCE_ROWS = 64
RESAMPLES = 2000
CODECS: dict[str, dict[str, Any]] = {
    "int4 g32": {"codec": "int4", "group": 32},
    "int4 g128 clipped": {"codec": "int4", "group": 128, "clip": True},
    "nf4 g64 + rank 32": {"codec": "nf4", "group": 64, "rank": 32},
    "entropy": {"codec": "entropy"},
    "entropy by row rms": {"codec": "entropy", "fisher_exponent": 0.0},
}


@dataclass(frozen=True)
class Arm:
    """One drafter to be made: codec, layers kept, bytes of its file, seconds of training, seed."""

    codec: str
    layers: int
    size_bytes: int
    seconds: float
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """Which arms, in order of what they tell; the two best go on to another seed and to doublings."""

    sizes: tuple[int, int, int] = (31_900_000, 22_000_000, 16_000_000)  # int4 g32 of 8 layers, and less
    seconds: float = 60.0
    first: tuple[tuple[str, int], ...] = (
        ("int4 g32", 8), ("entropy", 24), ("int4 g128 clipped", 9), ("entropy", 20), ("entropy", 30),
        ("entropy by row rms", 24), ("entropy", 16), ("nf4 g64 + rank 32", 6), ("entropy", 12),
    )  # fmt: skip
    second: tuple[tuple[str, int], ...] = (("int4 g32", 3), ("entropy", 24), ("entropy", 20), ("entropy", 30))
    third: tuple[tuple[str, int], ...] = (("entropy", 20), ("entropy", 24), ("entropy", 30))
    target_layers: int = 30
    doublings: int = 3


@dataclass(frozen=True)
class ClockedJob(Job):
    """A job that notes when each item of its progress was begun."""

    times: list[float] = field(default_factory=list)

    def progress(self, items: Iterable[Any], total: int | None = None, unit: str = "it",
                 start: int = 0) -> Iterator[Any]:
        """Iterate, and note the times; the last is that of the end."""
        for item in items:
            self.times.append(time.perf_counter())
            yield item
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def say(self, text: str) -> None:
        """Keep quiet: an arm has its own line."""

    @property
    def seconds(self) -> float:
        """Of all steps, the first one taken to be as long as the others."""
        if len(self.times) < 3:
            return 0.0
        return (self.times[-1] - self.times[1]) * (len(self.times) - 1) / (len(self.times) - 2)


class Bench:
    """What all arms share: the target, its text, and what was distilled already."""

    def __init__(self, root: Path, profile: Profile, lines: Path, deadline: float) -> None:
        self.profile, self.lines, self.deadline = profile, lines, deadline
        teacher = root / "build" / profile.name / "teacher"
        source = root / "vendor" / profile.target.source
        self.config, self.tensors = read_model(source, profile.target.format)
        self.rows: Rows = read_rows(teacher)
        # A line of another code, profile or teacher is no answer for this one.
        self.origin = digest_of({"profile": profile.model_dump(mode="json"),
                                 "code": code_digests(ROOT, ["stages.distill", "stages.qat"]),
                                 "rows": int(self.rows.continuation_sizes.sum())})
        self.sets = {name: read_conversations(teacher / f"{file}.jsonl")
                     for name, file in (("a", "heldout"), ("b", "dev"))}  # fmt: skip
        target = load_target(source, profile.target.format, "float32", profile.device)
        self.order = influence(target, self.rows)
        del target
        self.distilled: dict[tuple[int, float, int], tuple[Drafter, float, int]] = {}
        self.step_s: dict[tuple[str, int], float] = {}
        self.work = Path(tempfile.mkdtemp(prefix="draftmill-tau-"))
        self.done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []

    def run(self, arm: Arm) -> dict[str, Any] | None:
        """Return an arm's line; None where the seconds that are left do not suffice."""
        wanted = asdict(arm) | {"origin": self.origin}
        for line in self.done:
            if {name: line.get(name) for name in wanted} == wanted:
                return line
        if time.monotonic() + 1.3 * arm.seconds > self.deadline:
            print(f"no time left for {arm}", flush=True)
            return None
        line = wanted | self._trained(arm)
        self._clear()
        self.done.append(line)
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        with self.lines.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        told = "  ".join(f"{name} {line[f'tau_{name}']['tau']:.3f} ({line[f'tau_{name}']['low']:.3f} to "
                         f"{line[f'tau_{name}']['high']:.3f})" for name in self.sets)  # fmt: skip
        print(f"{arm.codec:20} {arm.layers:3} layers {line['file_bytes']:11,} bytes "
              f"{line['bits_per_weight']:.3f} bits {line['train_s']:6.1f} s seed {arm.seed}  {told}",
              flush=True)
        return line

    def _trained(self, arm: Arm) -> dict[str, Any]:
        start, distill_s, distill_steps = self._start(arm)
        steps = max(10, int((arm.seconds - distill_s) / self._step_s("qat", arm, start)))
        quantiser, job = self._quantiser(arm, start, steps)
        path = self.work / "packed.safetensors"
        metrics = quantiser.run(self.rows, self.sets["b"], path)
        found = self._judge(path)
        return found | {
            "distill_steps": distill_steps, "qat_steps": steps, "train_s": round(distill_s + job.seconds, 1),
            "file_bytes": path.stat().st_size, "bits_per_weight": metrics["bits_per_weight"],
            "packed_equals_trained": metrics["packed_equals_trained"],
        }  # fmt: skip

    def _start(self, arm: Arm) -> tuple[Drafter, float, int]:
        """Return the distilled drafter that an arm starts from, its seconds and steps."""
        key = (arm.layers, arm.seconds, arm.seed)
        if key not in self.distilled:
            whole = arm.layers == self.config.layers
            kept = tuple(sorted(self.order[: arm.layers]))
            config, tensors = prune(self.config, self.tensors, kept)
            if whole:
                steps = 0  # its sensitivities are measured, and nothing of it is changed
            else:
                step_s = self._step_s("distill", arm, Drafter(config, tensors, {}))
                steps = max(10, int(DISTILL_SHARE * arm.seconds / step_s))
            trainer, job = self._trainer(arm, config, tensors, steps)
            trainer.train(self.rows, self.sets["b"][:1])
            found = {name: one.cpu() for name, one in trainer.finished().items()}
            felt = {name: one.cpu() for name, one in trainer.sensitivities().items()}
            self.distilled[key] = Drafter(config, found, felt), job.seconds, steps
        return self.distilled[key]

    def _trainer(self, arm: Arm, config: ModelConfig, tensors: dict[str, Tensor],
                 steps: int) -> tuple[Trainer, ClockedJob]:
        settings = section(self.profile.distill, {"steps": steps, "evaluations": 1})
        job = self._job(arm)
        return Trainer(job, settings, config, tensors), job

    def _quantiser(self, arm: Arm, start: Drafter, steps: int) -> tuple[Quantiser, ClockedJob]:
        plain = {"codec_embedding": None, "clip": False, "rank": 0, "zstd": 0, "fisher_exponent": 1.0}
        settings = section(self.profile.qat, plain | {"steps": steps, "evaluations": 1} | CODECS[arm.codec])
        job = self._job(arm)
        limits = Limits(limit_bytes=arm.size_bytes + 1, reserve_bytes=1)
        return Quantiser(job, settings, limits, start), job

    def _step_s(self, kind: str, arm: Arm, start: Drafter) -> float:
        """Return the seconds of a step, from a short run the first time that it is asked for."""
        key = (kind if kind == "distill" else arm.codec, arm.layers)
        if key not in self.step_s:
            if kind == "distill":
                trainer, job = self._trainer(arm, start.config, start.weights, MEASURED_STEPS)
                trainer.train(self.rows, self.sets["b"][:1])
            else:
                quantiser, job = self._quantiser(arm, start, MEASURED_STEPS)
                quantiser.trainer.train(self.rows, self.sets["b"][:1])
            self.step_s[key] = job.seconds / MEASURED_STEPS
            self._clear()
        return self.step_s[key]

    def _clear(self) -> None:
        """Remove what trainers saved, gigabytes an arm."""
        for folder in self.work.iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)

    def _job(self, arm: Arm) -> ClockedJob:
        work = Path(tempfile.mkdtemp(dir=self.work))
        return ClockedJob("tau", None, {}, work, work, ROOT, arm.seed, self.profile.device, work / "log",
                          checkpoint_s=1e9)

    @torch.no_grad()
    def _judge(self, path: Path) -> dict[str, Any]:
        config, tensors = weights.load(path, self.profile.device)
        network = Network(config, torch.bfloat16, self.profile.device)
        network.load(tensors)
        found: dict[str, Any] = {}
        for name, conversations in self.sets.items():
            steps = [steps_of(network, one, self.profile.device) for one in conversations]
            tau = summary(conversations, steps)
            found |= {f"tau_{name}": {"tau": tau.tau, "low": tau.low, "high": tau.high},
                      f"counts_{name}": [[one.tokens, one.count] for one in steps]}  # fmt: skip
        return found


def section(original: Any, changes: dict[str, Any]) -> Any:
    """Return a profile's section with changes, checked as a profile is."""
    kind = Qat if isinstance(original, Qat) else Distill
    merged = original.model_dump(mode="json") | changes
    merged["warmup_steps"] = min(merged["warmup_steps"], merged["steps"] // 4)
    return kind.model_validate_json(json.dumps(merged))


def steps_of(network: Network, conversation: Conversation, device: str) -> Steps:
    """Return the steps that a drafter takes on a conversation, from one teacher-forced pass."""
    continuation = torch.tensor(conversation.continuation)
    if not len(continuation):
        return simulate([])
    nothing = torch.empty(len(continuation), 0)
    row = Row(torch.tensor(conversation.prompt), continuation, nothing, nothing)
    return simulate(network.choices(collate([row]).to(device)).cpu() == continuation)


@torch.no_grad()
def influence(target: Any, rows: Rows) -> list[int]:
    """Return the layers by falling block influence: 1 - cosine of a layer's input and output, summed."""
    totals = torch.zeros(target.config.layers, dtype=torch.float64)
    device = target.head_weight.device
    for index in range(min(INFLUENCE_ROWS, len(rows))):
        row = rows[index]
        tokens_1t = torch.cat((row.prompt, row.continuation)).long()[None].to(device)
        rotary = rotary_tables(torch.arange(tokens_1t.shape[1], device=device)[None], target.config)
        x_1td = target.model.embed_tokens(tokens_1t)
        for number, layer in enumerate(target.model.layers):
            y_1td = layer(x_1td, rotary, causal)
            totals[number] += float((1 - torch.cosine_similarity(x_1td, y_1td, dim=-1)).sum())
            x_1td = y_1td
    return totals.argsort(descending=True).tolist()


def arms(bench: Bench, plan: Plan) -> None:
    """Run all arms, the most telling first, as far as the seconds go."""
    size, smaller, smallest = plan.sizes
    first = [bench.run(Arm(codec, layers, size, plan.seconds)) for codec, layers in plan.first]
    best = leaders(list(filter(None, first)), plan.target_layers)
    for line in best:
        bench.run(replace(arm_of(line), seed=1))
    for codec, layers in plan.second:
        bench.run(Arm(codec, layers, smaller, plan.seconds))
    for codec, layers in plan.third:
        bench.run(Arm(codec, layers, smallest, plan.seconds))
    for start in best:
        line = start
        for _ in range(plan.doublings):
            longer = bench.run(replace(arm_of(line), seconds=2 * line["seconds"]))
            if longer is None or longer["tau_b"]["tau"] < (1 + GAIN) * line["tau_b"]["tau"]:
                break
            line = longer


def leaders(lines: Sequence[dict[str, Any]], target_layers: int) -> list[dict[str, Any]]:
    """Return the best entropy-coded arm that is not the target itself, and the best int4 arm, by (b)."""
    kinds = ([one for one in lines if one["codec"] == "entropy" and one["layers"] < target_layers],
             [one for one in lines if one["codec"].startswith("int4")])  # fmt: skip
    return [max(kind, key=lambda one: one["tau_b"]["tau"]) for kind in kinds if kind]


def arm_of(line: dict[str, Any]) -> Arm:
    """Return the arm that a line is of."""
    return Arm(**{name: line[name] for name in Arm.__dataclass_fields__})


def ratio(first: dict[str, Any], second: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Return tau of one arm over another's on a set, with its 95% interval, conversations resampled."""
    a_n2, b_n2 = (np.array([one for one in line[f"counts_{name}"] if one[0]]) for line in (first, second))
    random = np.random.default_rng(0)

    def of(rows: Any) -> float:
        return float(b_n2[rows][:, 1].sum() / a_n2[rows][:, 1].sum())

    drawn = [of(random.integers(0, len(a_n2), len(a_n2))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return of(slice(None)), float(low), float(high)


def report(lines: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """Print and return ratios at equal bytes and seconds: best entropy over best int4, rms over Fisher."""
    found = []
    seconds = sorted({line["seconds"] for line in lines})
    for size in plan.sizes:
        for budget in seconds:
            same = [one for one in lines if one["size_bytes"] == size and one["seconds"] == budget
                    and one["seed"] == 0]  # fmt: skip
            pairs = [tuple(best)] if len(best := leaders(same, plan.target_layers)) == 2 else []
            by_rms = [one for one in same if one["codec"] == "entropy by row rms"]
            pairs += [(one, other) for other in by_rms for one in same
                      if one["codec"] == "entropy" and one["layers"] == other["layers"]]  # fmt: skip
            for one, other in pairs:
                told = {name: ratio(one, other, name) for name in ("a", "b")}
                found.append({"of": asdict(arm_of(one)), "over": asdict(arm_of(other)), **told})
                names = [f"{line['codec']} x {line['layers']}" for line in (one, other)]
                print(f"{size:,} bytes, {budget:g} s: {' over '.join(names)}: " + ", ".join(
                    f"({name}) {middle:.3f} ({low:.3f} to {high:.3f})"
                    for name, (middle, low, high) in told.items()))  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the arms, report, and write benchmarks/results/tau-DEVICE.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tau", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1500, help="for everything (default 1500)")
    parser.add_argument("--arm-seconds", type=float, default=Plan.seconds, help="of training for each arm")
    parser.add_argument("--profile", default="smollm2-gpu")
    parser.add_argument("--root", type=Path, default=ROOT, help="where vendor/, build/ and profiles/ are")
    parser.add_argument("--lines", type=Path, default=ROOT / "build" / "tau.jsonl", help="one line an arm")
    parser.add_argument("--plan", type=json.loads, default={}, help="changes to the plan, as JSON")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    changed = {name: tuple(map(tuple, value)) if name in ("first", "second", "third") else
               tuple(value) if isinstance(value, list) else value for name, value in options.plan.items()}
    plan = replace(Plan(seconds=options.arm_seconds), **changed)
    profile = load_profile(options.profile, options.root / "profiles")
    bench = Bench(options.root, profile, options.lines, deadline)
    print(f"layers by influence: {bench.order}; {len(bench.rows)} training rows", flush=True)
    arms(bench, plan)
    ratios = report(bench.done, plan)
    write_results("tau", machine("make bench-tau") | {"influence": bench.order, "rows": len(bench.rows),
                                                      "arms": bench.done, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
