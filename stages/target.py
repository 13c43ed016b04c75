"""Pretrained models out of vendor/: the shape and weights of a target or base, of any format."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafter.model import Decoder, ModelConfig, build
from stages.errors import UserError
from stages.gguf import read_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_model(folder: Path, kind: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a model's shape and tensors, under transformers' names.

    Args:
        folder: where fetch left the model's files.
        kind: `gguf` (one file) or `hub` (config.json and safetensors, sharded or not).

    Raises:
        UserError: a file is missing, damaged or of an unsupported architecture.
    """
    try:
        return read_gguf(only_file(folder, "*.gguf")) if kind == "gguf" else _read_hub(folder)
    except ValueError as error:
        raise UserError(f"{error}; delete the file and run `make fetch`, or name another model") from error


def load_target(folder: Path, kind: str, dtype: str, device: str) -> Decoder:
    """Return the target ready for inference, in a compute type (`float32` or `bfloat16`) on a device."""
    config, tensors = read_model(folder, kind)
    try:
        return build(config, tensors, DTYPES[dtype], device)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file of a folder that matches.

    Raises:
        UserError: there is none, or more than one.
    """
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise UserError(f"{folder}: expected one {pattern}, found {len(found)}; run `make fetch`")
    return found[0]


def _read_hub(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = ModelConfig.from_transformers(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    index_path = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    placed: dict[str, str] = {}
    if index_path.is_file():
        placed = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(placed.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(folder / name))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name}: not a whole safetensors file ({error})") from error
    missing = sorted(placed.keys() - tensors.keys())
    if missing:
        shard = folder / placed[missing[0]]
        raise ValueError(f"{shard}: its index names {missing[0]}, which it does not hold")
    return config, tensors
