"""Runs one stage function in a process of its own: `python -m stages.wrapper.worker SPEC.json`.

The spec is written by `stages.run`; nothing here knows of make, containers or records.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

from pydantic import BaseModel, TypeAdapter

from stages.errors import UserError
from stages.files import write_json
from stages.job import Job
from stages.profile import Profile
from stages.wrapper.redaction import hide_secrets

PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Run the stage that the spec names; return 0, 2 for a user's mistake, 1 for a fault, 130 or 143."""
    arguments = sys.argv[1:] if argv is None else argv
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    _die_with(spec["parent"])
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    job = _job(spec)
    job.event("started", key=spec["key"])
    try:
        _check_devices(spec["devices"])
        metrics = importlib.import_module(f"stages.{job.stage}").run(job)
        result = {"metrics": metrics, **_seen(spec["devices"])}
        write_json(Path(spec["result"]), json.loads(hide_secrets(json.dumps(result, allow_nan=False))))
    except UserError as error:
        job.event("refused", reason=str(error))
        print(hide_secrets(f"draftmill: {job.stage}: {error}"), file=sys.stderr)
        return 2
    except Exception as error:
        job.event("failed", error=repr(error), traceback=traceback.format_exc())
        story = job.log.relative_to(job.root)
        print(hide_secrets(f"draftmill: {job.stage}: failed: {_brief(error)}; the whole story is in {story}"),
              file=sys.stderr)
        return 1
    return 0


def _die_with(parent: int) -> None:
    """Let the kernel end this process when the one that holds the lock dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(143)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _job(spec: dict[str, Any]) -> Job:
    paths = {name: Path(spec[name]) for name in ("out", "work", "root", "log")}
    inputs = {stage: Path(folder) for stage, folder in spec["inputs"].items()}
    sections = {name: _section(name, value) for name, value in spec["config"].items()}
    return Job(stage=spec["stage"], config=SimpleNamespace(**sections), inputs=inputs, seed=spec["seed"],
               device=spec["device"], checkpoint_s=spec["checkpoint_s"], **paths)


def _section(name: str, value: object) -> object:
    annotation: Any = Profile.model_fields[name].annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.model_validate_json(json.dumps(value))
    return TypeAdapter(annotation).validate_json(json.dumps(value))


def _check_devices(needed: int) -> None:
    if needed:
        import torch  # noqa: PLC0415 (only stages on a GPU pay for it here)

        found = torch.cuda.device_count()
        if found < needed:
            raise UserError(f"the profile says device = 'cuda', which needs {needed} GPU, and {found} can be "
                            "used here; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or choose a CPU profile")


def _seen(devices: int) -> dict[str, object]:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in whose)
    seen: dict[str, object] = {"peak_rss_bytes": peak_kib * 1024}
    if devices:
        import torch  # noqa: PLC0415

        seen["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return seen


def _brief(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:300]}"


if __name__ == "__main__":
    sys.exit(main())
