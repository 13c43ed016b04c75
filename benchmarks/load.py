"""bench-load: complete packages of random weights under a byte limit, built, read back and loaded.

Usage: python -m benchmarks.load [--shapes Qwen3-1.7B Qwen3-4B Qwen3-8B] [--limit 1000000000] [--folder F]

Each shape is planned into the limit less RESERVE, packed by the entropy codec and put beside the server's
code, as pack does. Then a process of its own loads it to each device, which checks every byte against the
sums of the header. Memory is what the process holds beyond the weights themselves, page cache not counted.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import machine, write_results
from drafter import weights
from drafter.config import ModelConfig
from drafter.model import Decoder
from drafter.settings import WEIGHTS
from stages import pack
from stages.bits.bases import BASES, bits_per_weight
from stages.bits.planner import Planner
from stages.bits.steps import log_steps

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ["Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B"]
RESERVE = 30_000_000  # of the limit, for code, wheels and evidence
SPREAD = 0.3          # of the rows' scales, and FELT_SPREAD of their sensitivities: natural logarithms
FELT_SPREAD = 1.5
SAMPLED_S = 0.005     # between two looks at a process's memory


class RandomTensors(Mapping[str, Tensor]):
    """Random weights by transformers' names, drawn anew each time one is asked for: only one is in memory."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        with torch.device("meta"):
            self.shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
        self.device = device

    def __getitem__(self, name: str) -> Tensor:
        """Draw one; always the same."""
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        random = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(self.shapes[name], generator=random, device=self.device)
        if drawn.ndim == 2:
            scales = torch.randn(len(drawn), 1, generator=random, device=self.device)
            drawn.mul_(0.02 * torch.exp(SPREAD * scales))
        return drawn

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.shapes)


def build(name: str, folder: Path, limit: int, device: str) -> dict[str, Any]:
    """Plan, pack and lay out one shape; return its bytes and seconds."""
    config, started = BASES[name], time.monotonic()
    tensors = RandomTensors(config, device)
    random = torch.Generator().manual_seed(1)
    felt = {name: 1e-8 * torch.exp(FELT_SPREAD * torch.randn(shape[0], generator=random))
            for name, shape in tensors.shapes.items() if len(shape) == 2}  # fmt: skip
    allotment = limit - RESERVE
    planner = Planner(config, allotment, partial(print, flush=True))
    packing = planner.fit(tensors, log_steps(tensors, felt, 1.0))
    folder.mkdir(parents=True)
    weights.save(folder / WEIGHTS, config, packing.plan, packing.parts)
    pack.copy_files(ROOT, pack.SHIPPED, folder)
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if total > limit:
        raise RuntimeError(f"{folder}: {total} bytes, over the limit of {limit}")
    return {"bits_per_weight": round(bits_per_weight(config, allotment), 3), "package_bytes": total,
            "weights_bytes": packing.size_bytes, "allotment_share": round(packing.size_bytes / allotment, 4),
            "build_s": round(time.monotonic() - started, 1)}  # fmt: skip


def load(path: Path, device: str) -> dict[str, Any]:
    """Load packed weights in this process; return seconds, rate and memory."""
    if device == "cuda":
        torch.zeros(1, device=device)  # the context is not the load
    before, peak, done = _own_bytes(), [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(peak, done), daemon=True)
    watcher.start()
    started = time.monotonic()
    _, tensors = weights.load(path, device, torch.bfloat16)
    if device == "cuda":
        torch.cuda.synchronize()
    took = time.monotonic() - started
    done.set()
    watcher.join()
    count = sum(tensor.numel() for tensor in tensors.values())
    own = sum(tensor.nbytes for tensor in tensors.values()) if device == "cpu" else 0
    beyond = max(peak[0], _own_bytes()) - before - own
    return {"seconds": round(took, 2), "million_weights_per_s": round(count / took / 1e6),
            "host_mib_beyond_result": round(beyond / 2**20)}  # fmt: skip


def _watch(peak: list[int], done: threading.Event) -> None:
    while not done.wait(SAMPLED_S):
        peak[0] = max(peak[0], _own_bytes())


def _own_bytes() -> int:
    """Return this process's memory that is no page of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def main(argv: list[str] | None = None) -> int:
    """Build and load every shape, and write benchmarks/results/load-DEVICE.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(BASES), default=SHAPES)
    parser.add_argument("--limit", type=int, default=1_000_000_000, help="bytes of a package (1e9)")
    parser.add_argument("--folder", type=Path, help="where packages stay (default: nowhere)")
    parser.add_argument("--load", nargs=2, metavar=("FILE", "DEVICE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.load:
        print(json.dumps(load(Path(options.load[0]), options.load[1])))
        return 0
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="draftmill-load-") as temporary:
        for name in options.shapes:
            folder = (options.folder or Path(temporary)) / name
            found[name] = build(name, folder, options.limit, devices[0])
            for device in devices:
                command = [sys.executable, "-m", "benchmarks.load", "--load", folder / WEIGHTS, device]
                done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
                found[name][device] = json.loads(done.stdout)
            print(name, found[name], flush=True)
            if not options.folder:
                shutil.rmtree(folder)
            write_results("load", machine("make bench-load") | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
