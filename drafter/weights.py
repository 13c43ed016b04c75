"""Packed weights: a safetensors file whose header holds the model's shape and each tensor's codec."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter import tensorfile
from drafter.codecs import Settings, codec
from drafter.config import ModelConfig

Plan = dict[str, Settings]


def encode(tensors: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Encode named float32 tensors by a plan; the parts' names are the tensor's plus the codec's suffix.

    Raises:
        ValueError: a value is not finite in bfloat16, or a tensor does not suit its codec; the message names
            the tensor.
    """
    parts = {}
    for name in sorted(tensors):
        check_finite(name, tensors[name].to(torch.bfloat16))  # what overflows there would load as infinite
        try:
            encoded = codec(plan[name]["codec"]).encode(tensors[name].float(), plan[name])
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error
        parts.update({name + suffix: part.contiguous() for suffix, part in encoded.items()})
    return parts


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds NaN or infinity.

    Raises:
        ValueError: it does; the message names the tensor and the first such row.
    """
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        row = int((~finite).reshape(tensor.shape[0], -1).any(-1).nonzero()[0])
        raise ValueError(f"tensor {name}, row {row}: not a finite number")


def save(path: Path, config: ModelConfig, plan: Plan, parts: dict[str, Tensor]) -> None:
    """Write packed weights; the same input gives the same bytes."""
    metadata = {"config": config.to_json(), "plan": json.dumps(plan, sort_keys=True)}
    on_host = {name: part.detach().cpu().contiguous() for name, part in sorted(parts.items())}
    tensorfile.save(on_host, path, metadata)


def load(path: Path, device: str = "cpu") -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read packed weights and decode every tensor to float32 on a device.

    Raises:
        ValueError: the file is missing, damaged or does not hold what its header says; the message names the
            file and, where it can, the tensor.
    """
    try:
        with safe_open(path, framework="pt", device=device) as stored:
            config, plan = read_header(path, stored.metadata())
            names = set(stored.keys())
            tensors = {}
            for name, settings in plan.items():
                own = [key for key in names if key == name or key.startswith(name + ".")]
                parts = {key.removeprefix(name): stored.get_tensor(key) for key in own}
                tensors[name] = _decode(path, name, parts, settings)
                names.difference_update(own)
    except (SafetensorError, OSError) as error:
        raise ValueError(not_whole(path, error)) from error
    if names:
        raise ValueError(f"{path}: holds tensors that its plan does not name: {', '.join(sorted(names)[:3])}")
    return config, tensors


def not_whole(path: Path, error: Exception) -> str:
    """Return the sentence for a safetensors file that is missing, cut, padded or something else."""
    size = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
    return f"{path}: {size}, not a whole safetensors file ({error})"


def read_header(path: Path, metadata: dict[str, str] | None) -> tuple[ModelConfig, Plan]:
    """Parse a packed file's header.

    Raises:
        ValueError: it has none, or not of this format.
    """
    try:
        header = metadata or {}
        plan: Any = json.loads(header["plan"])
        if not all({"codec", "shape"} <= entry.keys() for entry in plan.values()):
            raise ValueError("an entry of the plan lacks codec or shape")
        return ModelConfig.from_json(header["config"]), plan
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: its header is not a packed drafter's ({error})") from error


def _decode(path: Path, name: str, parts: dict[str, Tensor], settings: Settings) -> Tensor:
    try:
        tensor = codec(settings["codec"]).decode(parts, settings)
    except (KeyError, TypeError, ArithmeticError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: tensor {name} does not decode as {settings['codec']}: {error}") from error
    if list(tensor.shape) != list(settings["shape"]):
        found, expected = list(tensor.shape), settings["shape"]
        raise ValueError(f"{path}: tensor {name}: expected shape {expected}, found {found}")
    try:
        check_finite(name, tensor)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return tensor
