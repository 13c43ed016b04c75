"""distill: layers of a pretrained model become a drafter, trained on the target's own text."""

import re
from dataclasses import replace

import torch
from safetensors.torch import save_file

from drafter.config import ModelConfig
from drafter.model import Decoder
from drafter.replay import read_conversations
from stages.errors import UserError
from stages.files import write_jsonl
from stages.job import Job
from stages.models.target import read_model
from stages.training.online import target_states
from stages.training.rows import read_rows
from stages.training.trainer import Trainer
from stages.training.view import Weights

SECTIONS = ("target", "start", "distill")
TAKES = ("fetch/{target.source}/*", "fetch/{start.source}/*", "teacher/train-*", "teacher/dev.jsonl")
FILES = ()
LIBRARIES = ("torch", "safetensors", "gguf", "{distill.optimiser}")

LAYER = re.compile(r"^model\.layers\.(\d+)\.")
SCRATCH_DEVIATION = 0.02  # of the normal distribution that fresh matrices are drawn from, as GPT-2 has it


def run(job: Job) -> dict[str, object]:
    """Leave the drafter in bfloat16, its row sensitivities and the training log."""
    config, tensors = _start(job)
    trainer = Trainer(job, job.config.distill, config, tensors)
    dev = read_conversations(job.inputs["teacher"] / "dev.jsonl")
    metrics = trainer.train(read_rows(job.inputs["teacher"]), dev, target_states(job, job.config.distill))
    rounded = {name: master.to(torch.bfloat16).cpu() for name, master in trainer.finished().items()}
    save_file(rounded, job.out / "drafter.safetensors", metadata={"config": config.to_json()})
    on_host = {name: rows.cpu() for name, rows in trainer.sensitivities().items()}
    save_file(on_host, job.out / "sensitivity.safetensors")
    write_jsonl(job.out / "training.jsonl", trainer.log())
    return metrics


def _start(job: Job) -> tuple[ModelConfig, Weights]:
    start, target = job.config.start, job.config.target
    source, kind = (start.source, "hub") if start.base == "source" else (target.source, target.format)
    config, tensors = read_model(job.inputs["fetch"] / source, kind)
    if config.vocab_size < target.token_count:
        raise UserError(f"{source} has {config.vocab_size} ids, and target.token_count is "
                        f"{target.token_count}: a drafter needs all tokens of its target; name another "
                        "start.source")
    if start.base == "scratch":
        shape = replace(config, **start.shape.model_dump(), tied=True)
        return shape, fresh(shape, job.seed)
    return prune(config, tensors, start.layers)


def fresh(config: ModelConfig, seed: int) -> Weights:
    """Return the weights of a drafter that knows nothing yet: norms of 1, matrices of small random values."""
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        empty = Decoder(config).state_dict()
    return {
        name: torch.randn(value.shape, generator=random) * SCRATCH_DEVIATION if value.ndim == 2
        else torch.ones(value.shape)
        for name, value in sorted(empty.items())
    }


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
