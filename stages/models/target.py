"""Pretrained models out of vendor/: the shape and weights of a target or base, of any format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafter.config import ModelConfig
from drafter.model import Decoder, build, suited
from drafter.weights import not_whole
from stages.errors import UserError
from stages.models.gguf import read_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_model(folder: Path, kind: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a model's shape and tensors, under transformers' names.

    Args:
        folder: where fetch left the model's files.
        kind: `gguf` (one file) or `hub` (config.json and safetensors, sharded or not).

    Raises:
        UserError: a file is missing, damaged or of an unsupported architecture, or the tensors are not those
            of the shape; a tied head that equals the embedding is left out, one that differs is refused.
    """
    try:
        config, tensors = read_gguf(only_file(folder, "*.gguf")) if kind == "gguf" else _read_hub(folder)
    except ValueError as error:
        raise UserError(f"{error}; delete the file and run `make fetch`, or name another model") from error
    try:
        return config, suited(config, tensors)
    except ValueError as error:
        raise UserError(f"{folder}: {error}; name another model") from error


def load_target(folder: Path, kind: str, dtype: str, device: str) -> Decoder:
    """Return the target ready for inference, in a compute type (`float32` or `bfloat16`) on a device."""
    config, tensors = read_model(folder, kind)
    return build(config, tensors, DTYPES[dtype], device)


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
    config_path, index_path = folder / "config.json", folder / "model.safetensors.index.json"
    values = _read_object(config_path)
    try:
        config = ModelConfig.from_transformers(values)
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from error
    names = ["model.safetensors"]
    placed: dict[str, str] = {}
    if index_path.is_file():
        placed = _read_object(index_path).get("weight_map", {})
        shards = placed.values() if isinstance(placed, dict) else ()
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise ValueError(f"{index_path}: has no weight_map from tensors to shards")
        names = sorted(set(shards))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(folder / name))
        except (SafetensorError, OSError) as error:
            raise ValueError(not_whole(folder / name, error)) from error
    missing = sorted(placed.keys() - tensors.keys())
    if missing:
        shard = folder / placed[missing[0]]
        raise ValueError(f"{shard}: its index names {missing[0]}, which it does not hold")
    return config, tensors


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a whole JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value
