"""qat: the drafter is trained through the rounding of its codec, and its weights are packed."""

from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import drafter.codecs.bf16  # noqa: F401 (norms use it by name; imported, it is part of the key)
from drafter import weights
from drafter.codecs import Settings, round_trip
from drafter.config import ModelConfig
from drafter.replay import read_conversations
from stages.errors import UserError
from stages.files import write_jsonl
from stages.job import Job
from stages.training.shards import read_shards
from stages.training.trainer import Trainer, Weights

SECTIONS = ("limits", "qat")
TAKES = ("distill/drafter.safetensors", "teacher/train-*", "teacher/dev.jsonl")
FILES = ()
LIBRARIES = ("torch", "safetensors")
PLUGINS = (("qat.codec", "drafter.codecs"),)


def run(job: Job) -> dict[str, object]:
    """Leave the packed drafter and the training log.

    Raises:
        UserError: the packed weights cannot fit the allotment; found before training.
    """
    path = job.inputs["distill"] / "drafter.safetensors"
    with safe_open(path, framework="pt") as stored:
        config = ModelConfig.from_json(stored.metadata()["config"])
    start = load_file(path)
    plan = make_plan(start, job.config.qat.codec, job.config.qat.group)
    packed_bytes = _check_allotment(job, start, plan)
    trainer = Trainer(job, job.config.qat, config, start, lambda masters: straight_through(masters, plan))
    dev = read_conversations(job.inputs["teacher"] / "dev.jsonl")
    metrics = trainer.train(read_shards(job.inputs["teacher"]), dev)
    parts = weights.encode(trainer.finished(), plan)
    weights.save(job.out / "drafter.safetensors", config, plan, parts)
    write_jsonl(job.out / "training.jsonl", trainer.lines)
    return metrics | {"packed_bytes": packed_bytes}


def make_plan(tensors: Weights, codec: str, group: int) -> weights.Plan:
    """Plan a codec for each tensor: matrices by `codec`, norms in bfloat16."""
    plan: weights.Plan = {}
    for name, tensor in sorted(tensors.items()):
        plan[name] = {"codec": "bf16", "shape": list(tensor.shape)}
        if tensor.ndim == 2:
            plan[name] |= {"codec": codec, "group": group}
    return plan


def straight_through(masters: Weights, plan: weights.Plan) -> Weights:
    """Return what serving will see of the masters; gradients pass as if nothing had been rounded.

    Straight-through estimation: Bengio et al., arXiv 1308.3432.
    """
    return {
        name: StraightThrough.apply(master, plan[name])  # type: ignore[no-untyped-call]
        for name, master in masters.items()
    }


class StraightThrough(torch.autograd.Function):
    """Rounds on the way forward, and is the identity on the way back."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, settings: Settings) -> Tensor:
        """Return the stored value of a master, bit for bit."""
        return round_trip(master, settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on as it is."""
        return gradient, None


def _check_allotment(job: Job, start: Weights, plan: weights.Plan) -> int:
    parts = weights.encode(start, plan)
    size = sum(part.nbytes for part in parts.values())
    allotment = job.config.limits.allotment_bytes
    if size > allotment:
        raise UserError(
            f"the weights take {size} bytes packed by {job.config.qat.codec}, over the allotment of "
            f"{allotment} (limits.limit_bytes less reserve_bytes); keep fewer start.layers or raise the limit"
        )
    return size
