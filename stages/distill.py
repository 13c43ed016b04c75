"""distill: layers of a pretrained model become a drafter, trained on the target's own text."""

import re

import torch
from safetensors.torch import save_file

from drafter.config import ModelConfig
from drafter.replay import read_conversations
from stages.errors import UserError
from stages.files import write_jsonl
from stages.job import Job
from stages.models.target import read_model
from stages.training.shards import read_shards
from stages.training.trainer import Trainer, Weights

SECTIONS = ("target", "start", "distill")
TAKES = ("fetch/{target.source}/*", "fetch/{start.source}/*", "teacher/train-*", "teacher/dev.jsonl")
FILES = ()
LIBRARIES = ("torch", "safetensors", "gguf")

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def run(job: Job) -> dict[str, object]:
    """Leave the drafter in bfloat16, its row sensitivities and the training log."""
    config, tensors = _start(job)
    trainer = Trainer(job, job.config.distill, config, tensors)
    dev = read_conversations(job.inputs["teacher"] / "dev.jsonl")
    metrics = trainer.train(read_shards(job.inputs["teacher"]), dev)
    rounded = {name: master.to(torch.bfloat16).cpu() for name, master in trainer.finished().items()}
    save_file(rounded, job.out / "drafter.safetensors", metadata={"config": config.to_json()})
    on_host = {name: rows.cpu() for name, rows in trainer.sensitivities().items()}
    save_file(on_host, job.out / "sensitivity.safetensors")
    write_jsonl(job.out / "training.jsonl", trainer.lines)
    return metrics


def _start(job: Job) -> tuple[ModelConfig, Weights]:
    start, target = job.config.start, job.config.target
    source, kind = (target.source, target.format) if start.base == "target" else (start.source, "hub")
    config, tensors = read_model(job.inputs["fetch"] / source, kind)
    return prune(config, tensors, start.layers)


def prune(config: ModelConfig, tensors: Weights, layers: tuple[int, ...]) -> tuple[ModelConfig, Weights]:
    """Keep some layers of a model, renumbered in order; an empty list keeps all.

    Raises:
        UserError: a layer that the model does not have.
    """
    layers = layers or tuple(range(config.layers))
    if max(layers) >= config.layers:
        raise UserError(f"start.layers names layer {max(layers)}; the model has 0 to {config.layers - 1}")
    places = {old: new for new, old in enumerate(layers)}
    kept = {}
    for name, tensor in tensors.items():
        match = LAYER.match(name)
        if match is None:
            kept[name] = tensor
        elif int(match[1]) in places:
            kept[LAYER.sub(f"model.layers.{places[int(match[1])]}.", name)] = tensor
    return config.with_layers(len(layers)), kept
