"""qat: the drafter is trained through the rounding of its codec, and its weights are packed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import drafter.codecs.bf16  # noqa: F401 (norms use it by name; imported, it is part of the key)
from drafter import weights
from drafter.config import ModelConfig
from drafter.replay import Conversation, read_conversations
from stages.bits.planner import Planner
from stages.bits.steps import log_steps
from stages.bits.views import EntropyView, Packed, RoundTripView, View, fixed_plan
from stages.errors import UserError
from stages.files import write_jsonl
from stages.job import Job
from stages.profile import Limits, Qat
from stages.training.online import TargetStates, target_states
from stages.training.rows import Rows, read_rows
from stages.training.trainer import Trainer

SECTIONS = ("limits", "target", "qat")
TAKES = ("fetch/{target.source}/*", "distill/drafter.safetensors", "distill/sensitivity.safetensors",
         "teacher/train-*", "teacher/dev.jsonl")  # fmt: skip
FILES = ()
LIBRARIES = ("torch", "safetensors", "backports.zstd", "gguf", "{qat.optimiser}")
PLUGINS = (("qat.codec", "drafter.codecs"), ("qat.codec_embedding", "drafter.codecs"))

Weights = dict[str, Tensor]


def run(job: Job) -> dict[str, object]:
    """Leave the packed drafter and the training log.

    Raises:
        UserError: the packed weights cannot fit the allotment; found before training.
    """
    settings, limits = job.config.qat, job.config.limits
    quantiser = Quantiser(job, settings, limits, read_drafter(job.inputs["distill"]))
    dev = read_conversations(job.inputs["teacher"] / "dev.jsonl")
    metrics = quantiser.run(read_rows(job.inputs["teacher"]), dev, job.out / "drafter.safetensors",
                            target_states(job, settings))
    write_jsonl(job.out / "training.jsonl", quantiser.trainer.log())
    return metrics


@dataclass(frozen=True)
class Drafter:
    """What distill leaves: a shape, weights by name, and float32 [rows] of sensitivities for each matrix."""

    config: ModelConfig
    weights: Weights
    sensitivities: Weights


def read_drafter(folder: Path) -> Drafter:
    """Read what distill left in a folder."""
    path = folder / "drafter.safetensors"
    with safe_open(path, framework="pt") as stored:
        config = ModelConfig.from_json(stored.metadata()["config"])
    return Drafter(config, load_file(path), load_file(folder / "sensitivity.safetensors"))


class Quantiser:
    """Trains a drafter through its codec's rounding and packs it within an allotment.

    Args:
        job: its seed, device, places and voice are used.
        settings: the section `qat`.
        limits: the section `limits`.
        start: what it is trained from.

    Raises:
        UserError: the packed weights cannot fit the allotment.
    """

    def __init__(self, job: Job, settings: Qat, limits: Limits, start: Drafter) -> None:
        self.job, self.settings, self.config = job, settings, start.config
        self.allotment_bytes = limits.allotment_bytes
        tensors = {name: tensor.float().to(job.device) for name, tensor in start.weights.items()}
        try:
            for name, tensor in tensors.items():
                weights.check_finite(name, tensor)
            self.view = self._view(tensors, start)
        except ValueError as error:
            raise UserError(f"{error}; see the section qat of the profile") from error
        self.trainer = Trainer(job, settings, start.config, start.weights, self.view, measured=False)

    def run(self, rows: Rows, dev: list[Conversation], path: Path,
            target: TargetStates | None = None) -> dict[str, Any]:
        """Train, write the packed drafter, and return the metrics.

        Raises:
            UserError: the packed weights do not fit after all, or are not those of training.
        """
        metrics = self.trainer.train(rows, dev, target)
        masters = self.trainer.finished()
        before = self._grid()
        try:
            packed = self.view.pack(self.config, masters)
        except ValueError as error:  # a weight that is not finite
            raise UserError(f"{error}: nothing was packed; lower qat.learning_rate") from error
        self._check(packed)
        weights.save(path, self.config, packed.plan, packed.parts)
        self._check_equal(path, masters)
        tau = metrics["tau_dev"]
        if self._grid() != before:  # the last fit moved the steps after the last look at tau
            tau = self.trainer.tau(dev).to_json()
        weighed = sum(master.numel() for master in masters.values())
        share = packed.size_bytes / self.allotment_bytes
        self.job.say(f"packed {packed.size_bytes} bytes, {share:.2%} of the allotment, "
                     f"{packed.size_bytes * 8 / weighed:.3f} bits a weight")
        return metrics | {
            "tau_dev_packed": tau,
            "packed_bytes": packed.size_bytes,
            "packed_equals_trained": True,
            "allotment_share": round(share, 5),
            "bits_per_weight": round(packed.size_bytes * 8 / weighed, 4),
        }

    def _view(self, tensors: Weights, start: Drafter) -> View:
        if self.settings.codec == "entropy":
            logs = log_steps(tensors, start.sensitivities, self.settings.fisher_exponent)
            planner = Planner(self.config, self.allotment_bytes, self.job.say)
            return EntropyView(planner, tensors, logs, self.settings.learn_steps)
        view = RoundTripView(fixed_plan(tensors, self.settings), tensors)
        self._check(view.pack(self.config, tensors))
        return view

    def _check(self, packed: Packed) -> None:
        if packed.size_bytes > self.allotment_bytes:
            raise UserError(
                f"the weights take {packed.size_bytes} bytes packed by {self.settings.codec}, over the "
                f"allotment of {self.allotment_bytes} (limits.limit_bytes less reserve_bytes); keep fewer "
                "start.layers or raise the limit"
            )

    @torch.no_grad()
    def _check_equal(self, path: Path, masters: Weights) -> None:
        """Hold what the server would load to what training saw last, bit for bit."""
        _, loaded = weights.load(path)
        for name, seen in self.view(masters).items():
            if not torch.equal(seen.cpu(), loaded[name]):
                raise UserError(f"{path}: tensor {name} as packed is not what was trained; this is a fault "
                                "of draftmill's, please report it")

    def _grid(self) -> dict[str, float]:
        return {name: float(rows.double().sum()) for name, rows in self.view.state().items()}
