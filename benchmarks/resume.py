"""bench-resume: what a kill costs a training, and how far two undisturbed trainings are apart.

Usage: python -m benchmarks.resume --profile smollm2-gpu [--kinds deterministic] [--steps 100]

Takes drafter, shards and dev of a profile that was built, or of other folders. Trains the drafter on: twice
undisturbed and once killed (SIGKILL) at three random moments and resumed, with deterministic algorithms and
with the fastest ones, one process at a time. The killed run is held to the same bytes with deterministic
algorithms, and else to the largest difference of any weight between the two undisturbed runs: the noise.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.machine import machine, write_results
from drafter.replay import read_conversations
from stages.job import Job
from stages.profile import Training
from stages.qat import read_drafter
from stages.training.rows import read_rows
from stages.training.trainer import Trainer
from stages.wrapper.runner import compiler_caches

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"deterministic": True, "fastest": False}
DEV_CONVERSATIONS = 24
KILLS = 3


def train(options: argparse.Namespace, folder: Path, deterministic: bool) -> None:
    """Train in this process, from the newest checkpoint in the folder, and leave result.safetensors there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = read_drafter(options.drafter)
    settings = Training(dtype="bfloat16", steps=options.steps, learning_rate=5e-4,
                        batch_tokens=8_192 if device == "cuda" else 640, warmup_steps=options.steps // 10,
                        deterministic=deterministic)
    job = Job("bench", None, {}, folder, folder, folder, 0, device, folder / "log", checkpoint_s=0.5)
    trainer = Trainer(job, settings, start.config, start.weights, measured=False)
    dev = read_conversations(options.teacher / "dev.jsonl")[:DEV_CONVERSATIONS]
    metrics = trainer.train(read_rows(options.teacher), dev)
    finished = {name: weight.cpu() for name, weight in trainer.finished().items()}
    save_file(finished, folder / "result.safetensors", metadata={"tau": str(metrics["tau_dev"]["tau"])})


def start_process(options: argparse.Namespace, folder: Path, kind: str) -> "subprocess.Popen[bytes]":
    """Train in a process of its own, with the compilers' caches that the first one filled."""
    command = [sys.executable, "-m", "benchmarks.resume", "--drafter", str(options.drafter), "--teacher",
               str(options.teacher), "--steps", str(options.steps), "--into", str(folder), "--kinds", kind]
    environment = compiler_caches(ROOT) | os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    said = (folder.parent / f"{folder.name}.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)


def undisturbed(options: argparse.Namespace, folder: Path, kind: str) -> None:
    """Train in one process to the end."""
    if start_process(options, folder, kind).wait():
        fail(folder)


def killed(options: argparse.Namespace, folder: Path, kind: str) -> list[int]:
    """Train in processes that are killed once they are past random steps; return the steps killed at."""
    marks = sorted(random.Random(kind).sample(range(options.steps // 10, options.steps * 3 // 4), KILLS))
    seen = []
    for mark in [*marks, None]:
        process, first = start_process(options, folder, kind), newest(folder)
        while process.poll() is None:
            step = newest(folder)
            if mark is not None and step >= mark and step > first:
                process.send_signal(signal.SIGKILL)
                seen.append(step)
                break
            time.sleep(0.01)
        if process.wait() not in (0, -signal.SIGKILL):
            fail(folder)
    return seen


def fail(folder: Path) -> NoReturn:
    """Say why a training ended."""
    text = (folder.parent / f"{folder.name}.log").read_text(encoding="utf-8", errors="replace")
    raise SystemExit(f"draftmill: {folder.name} failed:\n{text[-2000:]}")


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder."""
    steps = (int(path.stem.rpartition("-")[2]) for path in folder.glob("checkpoint-*.safetensors"))
    return max(steps, default=0)


def compare(left: Path, right: Path) -> dict[str, Any]:
    """Return how far two results are apart."""
    pairs = [load_file(folder / "result.safetensors") for folder in (left, right)]
    largest = max(float((pairs[0][name] - pairs[1][name]).abs().max()) for name in pairs[0])
    same = all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])
    return {"largest_difference": largest, "same_weights": same}


def tau(folder: Path) -> float:
    """Return the simulated tau on dev that a run ended with."""
    with safe_open(folder / "result.safetensors", framework="pt") as result:
        return round(float(result.metadata()["tau"]), 4)


def measure(options: argparse.Namespace, place: Path) -> None:
    """Run all trainings, compare them, and write down each kind as it ends."""
    found: dict[str, Any] = {"steps": options.steps, "profile": options.profile}
    for kind in options.kinds:
        folders = [place / f"{kind}-{name}" for name in ("first", "second", "killed")]
        for folder in folders:
            folder.mkdir()
        for folder in folders[:2]:
            undisturbed(options, folder, kind)
        at = killed(options, folders[2], kind)
        found[kind] = {
            "undisturbed": compare(folders[0], folders[1]), "killed": compare(folders[0], folders[2]),
            "killed_past_steps": at, "tau_dev": [tau(folder) for folder in folders],
        }
        print(kind, json.dumps(found[kind]), flush=True)
        write_results("resume", machine(f"python -m benchmarks.resume --profile {options.profile}") | found)


def main(argv: list[str] | None = None) -> int:
    """Measure, and write benchmarks/results/resume-<device>.json."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="smollm2-gpu", help="its distill and teacher have run")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter, instead of the profile's")
    parser.add_argument("--teacher", type=Path, help="folder of shards, instead of the profile's")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which algorithms")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    build = ROOT / "build" / options.profile
    options.drafter = (options.drafter or build / "distill").resolve()
    options.teacher = (options.teacher or build / "teacher").resolve()
    for folder, name in ((options.drafter, "drafter.safetensors"), (options.teacher, "dev.jsonl")):
        if not (folder / name).is_file():
            print(f"draftmill: {folder} has no {name} yet; run make distill PROFILE={options.profile}",
                  file=sys.stderr)
            return 2
    if options.into:
        train(options, options.into, KINDS[options.kinds[0]])
        return 0
    with tempfile.TemporaryDirectory() as name:
        measure(options, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
