"""pack: the submission: weights, server, wheels, and the evidence of where all of it came from."""

import json
import os
import shutil
from pathlib import Path

from drafter import weights
from drafter.config import ModelConfig
from stages.errors import UserError
from stages.files import files_under, sha256_file, write_atomic, write_json
from stages.job import Job
from stages.upstream.downloads import DOWNLOADS
from stages.upstream.pinned import find, read_sources

SECTIONS = ("limits", "target", "teacher", "start", "serve")
TAKES = (
    "fetch/{target.source}/*", "data/data_manifest.json", "distill/training.jsonl", "qat/drafter.safetensors",
    "wheels",
)
FILES = ("serve.sh", "LICENSE", "drafter/**/*.py", "lock/sources.toml#{start.source}")
SHIPPED = tuple(name for name in FILES if "#" not in name)  # a table is read, for its pin
LIBRARIES = ("torch", "safetensors")
PLACE = "output"

EVIDENCE = "evidence"
SUMS = "SHA256SUMS"
SOURCE_PATTERNS = (
    "Makefile", "stages/**/*.py", "stages/sources/templates/*.toml", "profiles/*.toml", "lock/*.in",
    "lock/*.txt", "lock/*.toml", "examples/*.jsonl",
)
METHODS = {"scratch": "random weights"} | dict.fromkeys(("target", "source"), "layers of the base")
BUILD_STAGES = ("fetch", "data", "teacher", "distill", "qat", "wheels")


def run(job: Job) -> dict[str, object]:
    """Fill output/: the payload, which repeats byte for byte, and evidence/, which holds times and does not.

    Raises:
        UserError: the packed weights do not read back, or the submission is over its limits.
    """
    config = _weights(job)
    _settings(job, config)
    copy_files(job.root, SHIPPED, job.out)
    (job.out / "serve.sh").chmod(0o755)
    shutil.copytree(job.inputs["wheels"], job.out / "wheels")
    _evidence(job)
    write_json(job.out / "architecture.json", _architecture(job, config))
    _sums(job.out / EVIDENCE, files_under(job.out / EVIDENCE))
    payload = [name for name in files_under(job.out) if not name.startswith(f"{EVIDENCE}/")]
    _sums(job.out, payload)
    for folder, _, _ in os.walk(job.out):  # whoever serves it may be another user, whatever the umask here
        Path(folder).chmod(0o755)
    return _check_limits(job)


def _weights(job: Job) -> ModelConfig:
    path = job.out / "model.safetensors"
    _copy_file(job.inputs["qat"] / "drafter.safetensors", path)
    try:
        config, _ = weights.load(path)
    except ValueError as error:
        raise UserError(f"the packed weights do not read back: {error}") from error
    return config


def _settings(job: Job, config: ModelConfig) -> None:
    serve, target = job.config.serve, job.config.target
    if not 0 < target.token_count <= config.vocab_size:
        raise UserError(f"target.token_count is {target.token_count}; the model has {config.vocab_size} ids")
    serving = serve.model_dump(mode="json") | {"token_limit": target.token_count}
    write_json(job.out / "serving.json", serving)
    write_json(job.out / "config.json", json.loads(config.to_json()))


def _evidence(job: Job) -> None:
    """Copy records, logs and training source."""
    folder, logs = job.out / EVIDENCE, job.log.parent
    for stage in BUILD_STAGES:
        _copy_file(logs / f"{stage}.json", folder / "records" / f"{stage}.json")
        if (logs / f"{stage}.log").is_file():
            _copy_file(logs / f"{stage}.log", folder / "logs" / f"{stage}.log")
    _copy_file(job.inputs["fetch"] / DOWNLOADS, folder / "logs" / DOWNLOADS)
    for stage in ("distill", "qat"):
        _copy_file(job.inputs[stage] / "training.jsonl", folder / "logs" / f"{stage}-training.jsonl")
    _copy_file(job.inputs["data"] / "data_manifest.json", folder / "data_manifest.json")
    copy_files(job.root, SOURCE_PATTERNS, folder / "source")


def _training_evidence() -> list[str]:
    """The files that prove the training; SHA256SUMS names the rest. The same for every build of a kind."""
    records = [f"records/{stage}.json" for stage in BUILD_STAGES]
    logs = [f"logs/{name}" for name in (DOWNLOADS, "distill-training.jsonl", "qat-training.jsonl")]
    source = [f"source/stages/{stage}.py" for stage in BUILD_STAGES]
    return [*records, *logs, *source, "source/stages/training/trainer.py", "data_manifest.json", SUMS]


def _architecture(job: Job, config: ModelConfig) -> dict[str, object]:
    """What the contest's reviewer reads first; a function of the records alone."""
    target, start = job.config.target, job.config.start
    base = {"base_model": target.name, "base_revision": target.revision}
    if start.base == "source":
        source = find(read_sources(job.root / "lock/sources.toml"), start.source)
        base = {"base_model": source.uri, "base_revision": source.revision}
    if start.base == "scratch":
        base = {"base_model": "none", "base_revision": "from-scratch"}
    served = ["serve.sh", *(name for name in files_under(job.out) if name.startswith("drafter/"))]
    return base | {
        "target_model": target.name,
        "target_revision": target.revision,
        # The servers themselves stand in evidence/records/teacher.json: another address is no other text.
        "teacher": {"engine": job.config.teacher.engine, "rederivable": job.config.teacher.engine == "own"},
        "kept_layers": list(start.layers) or "all",
        "drafter": json.loads(config.to_json()),
        "weights": "model.safetensors",
        "method": f"{METHODS[start.base]}, distilled on the target's greedy text, then trained through "
                  "rounding",
        "training_corpora": json.loads((job.inputs["data"] / "data_manifest.json").read_text("utf-8")),
        "training_evidence_files": [f"{EVIDENCE}/{name}" for name in _training_evidence()],
        "inference_evidence_files": [*served, "serving.json", "config.json", "wheels/requirements.txt"],
    }


def _check_limits(job: Job) -> dict[str, object]:
    sizes = {name: (job.out / name).stat().st_size for name in files_under(job.out)}
    total, weight_bytes = sum(sizes.values()), sizes["model.safetensors"]
    limits = job.config.limits
    if total - weight_bytes > limits.reserve_bytes:
        raise UserError(
            f"code, wheels and evidence take {total - weight_bytes} bytes, over limits.reserve_bytes "
            f"({limits.reserve_bytes}); raise it: the weights' allotment shrinks by as much"
        )
    if total > limits.limit_bytes:
        raise UserError(f"output/ takes {total} bytes, over limits.limit_bytes ({limits.limit_bytes})")
    return {"bytes": total, "weight_bytes": weight_bytes, "files": len(sizes)}


def _sums(folder: Path, names: list[str]) -> None:
    lines = [f"{sha256_file(folder / name)}  {name}\n" for name in sorted(names) if name != SUMS]
    write_atomic(folder / SUMS, "".join(lines))


def copy_files(root: Path, patterns: tuple[str, ...], folder: Path) -> None:
    """Copy what the patterns name under a root to the same places under a folder."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                _copy_file(path, folder / path.relative_to(root))


def _copy_file(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)
    place.chmod(0o644)
