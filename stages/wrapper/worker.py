"""Runs one stage function in a process of its own.

    python -m stages.wrapper.worker SPEC.json --parent PID      on the host, and dies with that process
    python -m stages.wrapper.worker SPEC.json --contained       in a container: dies when its input closes

The spec is written by `stages.run`; nothing here knows of make, engines or records.
"""

import argparse
import importlib
import json
import os
import platform
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

from pydantic import BaseModel, TypeAdapter

from stages.errors import UserError
from stages.files import write_json
from stages.job import Job
from stages.profile import Profile
from stages.wrapper.confinement import breach, watch_network
from stages.wrapper.lifeline import die_with
from stages.wrapper.redaction import hide_secrets, without_private
from stages.wrapper.unlocked import unlocked
from stages.wrapper.voice import need_no_listener


def main(argv: list[str] | None = None) -> int:
    """Run the stage that the spec names; return 0, 2 for a user's mistake, 1 for a fault, 130 or 143."""
    parser = argparse.ArgumentParser(prog="python -m stages.wrapper.worker")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--contained", action="store_true")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    if options.parent:
        die_with(options.parent)
    if options.contained:
        _die_with_input()
    spec = json.loads(options.spec.read_text(encoding="utf-8"))
    job = _job(spec)
    if spec["reach"] or (options.contained and not spec["network"]):
        watch_network(job)
    job.event("started", key=spec["key"])
    try:
        _check_devices(spec["devices"])
        metrics = importlib.import_module(f"stages.{job.stage}").run(job)
        result = {"metrics": metrics, **_seen(job.root, spec["devices"])}
        write_json(Path(spec["result"]), without_private(result, job.root))
    except UserError as error:
        job.event("refused", reason=str(error))
        print(hide_secrets(f"draftmill: {job.stage}: {error}"), file=sys.stderr)
        return 2
    except Exception as error:
        if options.contained and (sentence := breach(error, job, spec["writes"])):
            job.event("refused", reason=sentence)
            print(hide_secrets(f"draftmill: {job.stage}: {sentence}"), file=sys.stderr)
            return 2
        job.event("failed", error=repr(error), traceback=traceback.format_exc())
        story = job.log.relative_to(job.root)
        print(hide_secrets(f"draftmill: {job.stage}: failed: {_brief(error)}; the whole story is in {story}"),
              file=sys.stderr)
        return 1
    return 0


def _die_with_input() -> None:
    """End when standard input closes: a container would outlive its caller; the caller's pipe does not."""
    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _job(spec: dict[str, Any]) -> Job:
    paths = {name: Path(spec[name]) for name in ("out", "work", "root", "log")}
    inputs = {stage: Path(folder) for stage, folder in spec["inputs"].items()}
    sections = {name: _section(name, value) for name, value in spec["config"].items()}
    return Job(stage=spec["stage"], config=SimpleNamespace(**sections), inputs=inputs, seed=spec["seed"],
               device=spec["device"], checkpoint_s=spec["checkpoint_s"], runner=spec["runner"],
               reach=tuple(spec["reach"]), **paths)


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


def _seen(root: Path, devices: int) -> dict[str, object]:
    """What the record says of where the stage ran, seen from where it ran."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in whose)
    strangers = unlocked(root)
    seen: dict[str, object] = {
        "peak_rss_bytes": peak_kib * 1024, "python": platform.python_version(),
        "platform": platform.platform(), "locked": not strangers, "unlocked": strangers}
    if devices:
        import torch  # noqa: PLC0415

        seen["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return seen


def _brief(error: Exception) -> str:
    first = hide_secrets((str(error).strip() or "no message").splitlines()[0])
    return f"{type(error).__name__}: {first[:300]}"


def _leave() -> NoReturn:
    """Run the stage; where it fails or is stopped, end without waiting for what its threads are at."""
    need_no_listener()
    try:
        code = main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    if not code:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave()
