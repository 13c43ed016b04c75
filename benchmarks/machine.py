"""What every benchmark writes down beside its numbers: the machine, the versions, the command."""

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from stages.files import write_json

RESULTS = Path(__file__).resolve().parent / "results"


def device() -> str:
    """Return the name of the GPU, or of the processor where there is none, fit for a file name."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"cpu-{os.cpu_count()}-cores"


def machine(command: str) -> dict[str, Any]:
    """Describe machine and versions."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    model = next((line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")), "")
    found = {"command": command, "processor": model, "cores": os.cpu_count(), "torch": torch.__version__,
             "python": platform.python_version()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def write_results(name: str, found: dict[str, Any]) -> None:
    """Write `results/<name>-<device>.json`."""
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}-{device()}.json", json.loads(json.dumps(found)))
