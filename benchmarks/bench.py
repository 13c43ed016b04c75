"""How an arm of a bench is made: layers of the target, distilled, trained through a codec, packed and judged.

A fifth of an arm's steps distils, the rest trains through the codec. The first step of each, which compiles,
is not counted. The file is read back and judged on (a) rows held out of the training sources and (b) the dev
conversations of another hand.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.arms import CODECS, SETS, Arm, arm_of, section, told
from benchmarks.selection import Part, influence, parts
from benchmarks.workers import ROOT, Line, Lines, line_of, work
from drafter import weights
from drafter.config import ModelConfig
from drafter.replay import read_conversations, summary
from stages.bits.views import replan_step
from stages.distill import prune
from stages.errors import UserError
from stages.files import digest_of, read_json, write_json
from stages.job import Job
from stages.models.target import load_target, read_model
from stages.profile import Limits, Profile
from stages.qat import Drafter, Quantiser, read_drafter
from stages.training.evaluation import simulated_steps
from stages.training.network import Network
from stages.training.rows import Rows, read_rows
from stages.training.trainer import Trainer
from stages.wrapper.code import code_digests

DISTILL_SHARE = 0.2
MEASURED_STEPS = 12  # of a short run that tells how long a step takes
LEAST_STEPS = 4


@dataclass(frozen=True)
class ClockedJob(Job):
    """A job that notes when each item of its progress was begun, and may end after some of them."""

    times: list[float] = field(default_factory=list)
    most: int = 0  # items; 0 is all

    def progress(self, items: Iterable[Any], total: int | None = None, unit: str = "it",
                 start: int = 0) -> Iterator[Any]:
        """Iterate, and note the times; the last is that of the end."""
        for item in islice(items, self.most or None):
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
    """What all arms share: the target, its text, what was distilled already, and how long a step takes.

    Args:
        root: where vendor/ and build/ are.
        profile: its target, teacher and sections distill and qat.
        lines: the arms' results; what is shared lies beside them.

    Raises:
        UserError: the profile's teacher has not run.
    """

    def __init__(self, root: Path, profile: Profile, lines: Lines) -> None:
        self.profile, self.lines = profile, lines
        built = root / "build" / profile.name
        if not (built / "teacher" / "dev.jsonl").is_file():
            raise UserError(f"{built} has no teacher's text yet; run make teacher PROFILE={profile.name}")
        source = root / "vendor" / profile.target.source
        self.config, self.tensors = read_model(source, profile.target.format)
        self.rows = read_rows(built / "teacher")
        self.prompts = built / "data" / "train.jsonl"
        self.sets = {name: read_conversations(built / "teacher" / f"{file}.jsonl")
                     for name, file in SETS.items()}  # fmt: skip
        self.origin = digest_of({
            "profile": profile.model_dump(mode="json"),
            "code": code_digests(ROOT, ["stages.distill", "stages.qat"]),
            "rows": int(self.rows.continuation_sizes.sum()),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        })
        target = load_target(source, profile.target.format, "float32", profile.device)
        self.order = influence(target, self.rows)
        self._folder = tempfile.TemporaryDirectory(prefix="draftmill-arm-")
        self.work = Path(self._folder.name)
        self._parts: dict[str, Tensor] = {}

    def key(self, arm: Arm) -> Line:
        """Return what an arm's line is known by; a line of another code, profile or text is no answer."""
        return asdict(arm) | {"origin": self.origin}

    def make(self, key: Line) -> Line:
        """Make an arm and return the rest of its line."""
        arm = arm_of(key)
        began = time.monotonic()
        start, distill_s, distill_steps = self._start(arm)
        steps = self._steps("qat", arm, start, distill_s)
        quantiser, job = self._quantiser(arm, start, steps)
        path = self.work / "packed.safetensors"
        metrics = quantiser.run(self._rows(arm), self.sets["b"], path)
        del quantiser
        batches = self.profile.distill.batch_tokens, self.profile.qat.batch_tokens
        line = self._judge(path) | {
            "distill_steps": distill_steps, "qat_steps": steps, "train_s": round(distill_s + job.seconds, 1),
            "tokens": distill_steps * batches[0] + steps * batches[1],
            "file_bytes": path.stat().st_size, "bits_per_weight": metrics["bits_per_weight"],
            "packed_equals_trained": metrics["packed_equals_trained"], "rows": len(self._rows(arm)),
            "wall_s": round(time.monotonic() - began, 1),
        }  # fmt: skip
        self._clear()
        print(told(key | line), flush=True)
        return line

    def _rows(self, arm: Arm) -> Rows:
        if not arm.steps:
            return self.rows
        self._parts = self._parts or parts(self.rows, self.prompts)
        return Part(self.rows, self._parts[arm.sources])

    def _start(self, arm: Arm) -> tuple[Drafter, float, int]:
        """Return the distilled drafter that an arm starts from, its seconds and steps; kept for others."""
        folder = self.lines.shared / digest_of(self.key(arm) | {"codec": "", "size_bytes": 0})[:16]
        if not folder.is_dir():
            config, tensors = prune(self.config, self.tensors, tuple(sorted(self.order[: arm.layers])))
            # The target itself is not changed: only its sensitivities are measured.
            whole = arm.layers == self.config.layers
            steps = 0 if whole else self._steps("distill", arm, Drafter(config, tensors, {}), 0.0)
            trainer, job = self._trainer(arm, config, tensors, steps)
            trainer.train(self._rows(arm), self.sets["b"][:1])
            self._keep(trainer, folder, {"seconds": str(job.seconds), "steps": str(steps)})
            self._clear()
        with safe_open(folder / "drafter.safetensors", framework="pt") as stored:
            header = stored.metadata()
        return read_drafter(folder), float(header["seconds"]), int(header["steps"])

    def _keep(self, trainer: Trainer, folder: Path, header: dict[str, str]) -> None:
        """Write what was distilled so that another worker sees the whole folder or none."""
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        header |= {"config": trainer.config.to_json()}
        for name, tensors in (("sensitivity", trainer.sensitivities()), ("drafter", trainer.finished())):
            on_host = {key: one.cpu() for key, one in tensors.items()}
            save_file(on_host, partial / f"{name}.safetensors", header)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(partial)  # another worker was as quick

    def _steps(self, kind: str, arm: Arm, start: Drafter, spent_s: float) -> int:
        """Return how many steps the one or the other training of an arm takes."""
        share = DISTILL_SHARE if kind == "distill" else 1 - DISTILL_SHARE
        if arm.steps:
            return max(LEAST_STEPS, round(share * arm.steps))
        seconds = share * arm.seconds if kind == "distill" else arm.seconds - spent_s
        pace = self._pace(kind, arm, start)
        return max(LEAST_STEPS, int((seconds - pace["once_s"]) / pace["step_s"]))

    def _pace(self, kind: str, arm: Arm, start: Drafter) -> dict[str, float]:
        """Return the seconds of a step, and of planning again: from a short run, the first time."""
        changes = {} if kind == "distill" else CODECS[arm.codec] | {"fisher_exponent": 0.0}
        key = digest_of({"kind": kind, "layers": arm.layers, "origin": self.origin, "changes": changes})
        path = self.lines.shared / f"{key[:16]}.pace"
        if not path.is_file():
            many, once_s = 100 * MEASURED_STEPS, 0.0
            if kind == "distill":
                trainer, job = self._trainer(arm, start.config, start.weights, many, MEASURED_STEPS)
            else:
                quantiser, job = self._quantiser(arm, start, many, MEASURED_STEPS)
                trainer = quantiser.trainer
            trainer.train(self.rows, self.sets["b"][:1])
            if kind == "qat":
                began = time.perf_counter()
                quantiser.view.begin(replan_step(many), many, trainer.finished())
                once_s = time.perf_counter() - began
            self._clear()
            write_json(path, {"step_s": job.seconds / MEASURED_STEPS, "once_s": once_s})
        found: dict[str, float] = read_json(path)
        return found

    def _trainer(self, arm: Arm, config: ModelConfig, tensors: dict[str, Tensor],
                 steps: int, most: int = 0) -> tuple[Trainer, ClockedJob]:
        settings = section(self.profile.distill, {"steps": steps, "evaluations": 1})
        job = self._job(arm, most)
        return Trainer(job, settings, config, tensors), job

    def _quantiser(self, arm: Arm, start: Drafter, steps: int,
                   most: int = 0) -> tuple[Quantiser, ClockedJob]:
        settings = section(self.profile.qat, {"steps": steps, "evaluations": 1} | CODECS[arm.codec])
        job = self._job(arm, most)
        limits = Limits(limit_bytes=arm.size_bytes + 1, reserve_bytes=1)
        return Quantiser(job, settings, limits, start), job

    def _clear(self) -> None:
        """Remove what trainers saved, gigabytes an arm."""
        for folder in self.work.iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)

    def _job(self, arm: Arm, most: int) -> ClockedJob:
        work = Path(tempfile.mkdtemp(dir=self.work))
        return ClockedJob("arm", None, {}, work, work, ROOT, arm.seed, self.profile.device, work / "log",
                          checkpoint_s=1e9, most=most)

    @torch.no_grad()
    def _judge(self, path: Path) -> Line:
        config, tensors = weights.load(path, self.profile.device)
        network = Network(config, torch.bfloat16, self.profile.device)
        network.load(tensors)
        found: Line = {}
        for name, conversations in self.sets.items():
            steps = simulated_steps(network, conversations, self.profile.device)
            tau = summary(conversations, steps)
            found |= {f"tau_{name}": {"tau": tau.tau, "low": tau.low, "high": tau.high},
                      f"counts_{name}": [[one.tokens, one.count] for one in steps]}  # fmt: skip
        return found


def run_worker(options: argparse.Namespace, profile: Profile, arms: Callable[[list[Line]], Iterable[Arm]],
               room: Callable[[list[Line], Arm, float], bool]) -> int:
    """Make arms in this process; return how many failed.

    Args:
        options: what `parser_of` reads, with a worker's own.
        profile: see Bench.
        arms: from the lines of this code, profile and text so far, all arms, the most telling first.
        room: from those lines, an arm and the time of the end, whether it may be begun.
    """
    os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    lines = Lines(options.lines)
    bench = Bench(options.root, profile, lines)
    print(f"layers by influence: {bench.order}; {len(bench.rows)} training rows", flush=True)

    def wanted(found: list[Line]) -> Iterator[Line]:
        ours = [line for line in found if line["origin"] == bench.origin]
        for arm in arms(ours):
            if line_of(bench.key(arm), ours) is None and room(ours, arm, options.until):
                yield bench.key(arm)

    return work(lines, wanted, bench.make)
