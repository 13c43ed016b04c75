"""The training loop that distill and qat share: fixed work, checkpoints, exact resume."""

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drafter.config import ModelConfig
from drafter.model import EMBEDDING, HEAD
from drafter.replay import Conversation, Tau
from stages.errors import UserError
from stages.job import Job
from stages.models.target import DTYPES
from stages.training.batches import Batch, Schedule, Selection, collate, prefetched
from stages.training.checkpoints import Checkpoints
from stages.training.evaluation import simulated_tau
from stages.training.interruption import Interruption
from stages.training.loss import Loss, Targets, learning_rate
from stages.training.network import Network
from stages.training.online import TargetStates
from stages.training.optimiser import make_optimiser, restore, state_of
from stages.training.rows import Rows
from stages.training.sensitivity import FELT_STEPS, RowFisher
from stages.training.view import Identity, View, Weights

EMBEDDINGS = (EMBEDDING, HEAD)
PARTS = ("master", "optimiser", "average", "fisher", "state")
LOOK_STEPS = 16  # how many steps may be under way before their losses are looked at
LOGGED = 250     # steps in a log: it ships, so it may not grow with the training
STEP_KEYS = {"step", "positions", "rate", "loss", "ce", "kl"}


class Trainer:
    """Trains a drafter's float32 masters for a fixed number of steps.

    Args:
        job: the stage's job; checkpoints go to its work folder.
        settings: the stage's Training section.
        config: the drafter's shape.
        start: its tensors under transformers' names, any floating type.
        view: what the forward pass sees of the masters, e.g. their rounding.
        measured: whether row sensitivities are measured.
    """

    def __init__(self, job: Job, settings: Any, config: ModelConfig, start: Weights,
                 view: View | None = None, *, measured: bool = True) -> None:
        set_determinism(settings.deterministic or job.device == "cpu")
        self.job, self.settings, self.config, self.view = job, settings, config, view or Identity()
        placed = {name: start[name].float().to(job.device).clone() for name in sorted(start)}
        frozen = () if settings.train_embedding else EMBEDDINGS
        self.masters = {name: placed[name].requires_grad_() for name in placed if name not in frozen}
        self.frozen = {name: placed[name] for name in placed if name in frozen}
        self.trained = self.masters | {f"view/{name}": one for name, one in self.view.parameters().items()}
        self.averages = {name: master.detach().clone() for name, master in self.masters.items()
                         } if settings.ema_decay else {}
        self.network = Network(config, DTYPES[settings.dtype], job.device, compiled=job.device == "cuda",
                               checkpointing=settings.activation_checkpointing)
        self.optimiser = make_optimiser(settings.optimiser, list(self.trained.values()))
        rows = {name: len(tensor) for name, tensor in placed.items() if tensor.ndim == 2 and measured}
        self.fisher = RowFisher(rows, self.frozen, settings.steps, job.device)
        self.checkpoints = Checkpoints(job.work, job.checkpoint_s)
        self.frozen_seen: Weights = {}  # what the view makes of the frozen, until it moves
        self.step = 0
        self.lines: list[dict[str, Any]] = []
        self.unseen: list[tuple[dict[str, Any], Tensor]] = []  # lines whose losses are still on the device

    def train(self, rows: Rows, dev: list[Conversation],
              target: TargetStates | None = None) -> dict[str, Any]:
        """Run to the last step, resuming from the newest checkpoint, and return the metrics.

        Args:
            rows: training rows.
            dev: conversations on which tau is simulated before, after, and as often as asked in between.
            target: the target itself, for its whole distribution; without it the rows' top-k is used.

        Raises:
            UserError: no row can be trained on, a loss is not finite, or a checkpoint cannot be written.
            SystemExit: a signal asked for it; the state is saved.
        """
        kept = Selection(rows, self.settings.max_row_tokens)
        resumed = self._resume()
        if not resumed:
            self._log(step=0, tau_dev=round(self.tau(dev).tau, 4))
        self.job.say(f"{len(kept)} rows of {int(kept.sizes.sum())} tokens; "
                     f"{kept.dropped} rows without a token to predict")
        if target:
            target.prepare(kept, self.config.vocab_size)
        if not (self.settings.steps or resumed):
            self._measure(kept, target)
        with Interruption() as interruption:
            for batch in self.job.progress(self._batches(kept, target, self.settings.steps),
                                           self.settings.steps, unit="step", start=self.step):
                self._train_step(*batch)
                if self.step in self._evaluations():
                    self._log(step=self.step, tau_dev=round(self.tau(dev).tau, 4))
                if interruption.asked:
                    self._stop(interruption.asked)
                if self.checkpoints.due():
                    self._save()
        return self._finish(kept, dev)

    def finished(self) -> Weights:
        """Return all weights at full precision: the masters or their average, and what was never trained."""
        return self.frozen | (self.averages or {name: one.detach() for name, one in self.masters.items()})

    def sensitivities(self) -> Weights:
        """Return for each matrix its rows' mean squared gradient, float32 [rows]; see RowFisher."""
        return self.fisher.means()

    @torch.no_grad()
    def tau(self, conversations: list[Conversation]) -> Tau:
        """Simulate tau of the weights as they would be finished now."""
        self.network.load(self.view(self.finished()))
        return simulated_tau(self.network, conversations, self.job.device)

    def _measure(self, kept: Selection, target: TargetStates | None) -> None:
        """Take the sensitivities, where they are wanted, of weights that nothing is to be changed in."""
        for batch in self._batches(kept, target, FELT_STEPS if self.fisher.sums else 0):
            self._backward(*batch)
            self.optimiser.zero_grad(set_to_none=True)

    def _batches(self, kept: Selection, target: TargetStates | None,
                 steps: int) -> Iterator[tuple[Batch, Targets]]:
        schedule = Schedule(kept.sizes, self.settings.batch_tokens, self.job.seed)
        on_gpu = self.job.device == "cuda"
        # A compiled layer is made for one number of tokens.
        width, longest = (self.settings.batch_tokens, self.settings.max_row_tokens) if on_gpu else (0, 0)
        numbers = [schedule.rows(step) for step in range(self.step, steps)]
        made = (collate([kept[row] for row in rows], width, longest) for rows in numbers)
        for rows, host in zip(numbers, prefetched(made, on_gpu), strict=True):
            batch = host.to(self.job.device)
            known = Targets(batch.targets_n, batch.topk_ids_nk, batch.topk_logprobs_nk)
            yield batch, target.join(known, rows) if target else known

    def _train_step(self, batch: Batch, targets: Targets) -> None:
        try:
            moved = self.view.begin(self.step, self.settings.steps, self.finished())
        except (RuntimeError, ValueError):
            self._look()  # a loss that is not finite, and not yet looked at, is the better reason
            raise
        if moved:
            self.frozen_seen = {}
        rate = learning_rate(
            self.step, self.settings.steps, self.settings.warmup_steps, self.settings.learning_rate
        )
        result = self._backward(batch, targets)
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.settings.clip_norm)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.averages:
            torch._foreach_lerp_(list(self.averages.values()),
                                 [one.detach() for one in self.masters.values()], 1 - self.settings.ema_decay)
        self.step += 1
        self._log(step=self.step, positions=result.positions, rate=rate, **moved)
        self.unseen.append((self.lines[-1], torch.stack([*result[:3], norm]).detach()))
        if len(self.unseen) >= LOOK_STEPS or self.job.device == "cpu":
            self._look()

    def _backward(self, batch: Batch, targets: Targets) -> Loss:
        """Leave a batch's gradients in the masters, through the view, and return the loss."""
        seen = self._seen()
        self.network.load(seen)
        for name, weight in self.network.weights.items():
            weight.requires_grad_(seen[name].requires_grad or self.fisher.wants(name, self.step))
        result = self.network.backward(batch, targets, self.settings.ce_share)
        for name, weight in self.network.weights.items():
            gradient, weight.grad = weight.grad, None
            if gradient is None:
                continue
            if self.fisher.wants(name, self.step):
                self.fisher.add(name, gradient)
            if seen[name] is self.masters.get(name):
                seen[name].grad = gradient.float()
            elif seen[name].requires_grad:  # one after the other: no gradient is held twice
                torch.autograd.backward([seen[name]], [gradient.to(seen[name].dtype)])
        return result

    def _seen(self) -> Weights:
        """Return what the forward pass sees; of the frozen only anew where the view may have moved."""
        if self.view.parameters():
            return self.view(self.frozen | self.masters)
        if not self.frozen_seen:
            self.frozen_seen = {name: one.detach() for name, one in self.view(self.frozen).items()}
        return self.frozen_seen | self.view(self.masters)

    def _evaluations(self) -> set[int]:
        count = self.settings.evaluations
        return {self.settings.steps * number // count for number in range(1, count)}

    def _finish(self, kept: Selection, dev: list[Conversation]) -> dict[str, Any]:
        self._look()
        self._save()
        self.checkpoints.wait()
        final, before = self.tau(dev), self.lines[0]["tau_dev"]
        self.job.say(f"simulated tau on dev: {before:.3f} before, {final.tau:.3f} after")
        self._log(step=self.step, tau_dev=round(final.tau, 4))
        return {
            "rows": len(kept),
            "rows_dropped": kept.dropped,
            "target_tokens": int(kept.targets.sum()),
            "positions_trained": sum(line.get("positions", 0) for line in self.lines),
            "tau_dev_before": before,
            "tau_dev": final.to_json(),
        }

    def _stop(self, number: int) -> None:
        self._save()
        self.checkpoints.wait()
        self.job.say(f"stopped by signal {number} after step {self.step}, and saved")
        raise SystemExit(128 + number)

    def log(self) -> list[dict[str, Any]]:
        """Return the lines that are left for reviewers: all evaluations and plans, and about LOGGED steps."""
        every = max(1, -(-self.settings.steps // LOGGED))  # there may be no steps at all
        return [line for line in self.lines if line["step"] % every == 0 or not STEP_KEYS.issuperset(line)]

    def _log(self, **line: Any) -> None:
        self.lines.append(line)

    def _look(self) -> None:
        """Write the losses of the latest steps down; on a GPU waiting for each would leave it idle.

        Raises:
            UserError: one is not finite.
        """
        unseen, self.unseen = self.unseen, []
        for line, values in unseen:
            total, ce, kl, norm = values.tolist()
            if not math.isfinite(total + norm):
                raise UserError(f"step {line['step']}: the loss ({total}) or its gradient's norm ({norm}) is "
                                "not finite; lower learning_rate")
            line |= {"loss": round(total, 5), "ce": round(ce, 5), "kl": round(kl, 5)}

    def _save(self) -> None:
        self._look()  # what is not finite is never saved
        tensors = {f"master/{name}": one.detach() for name, one in self.trained.items()}
        tensors |= {f"optimiser/{name}": one for name, one in state_of(self.optimiser, self.trained).items()}
        tensors |= {f"average/{name}": one for name, one in self.averages.items()}
        tensors |= {f"fisher/{name}": one for name, one in self.fisher.sums.items()}
        tensors |= {f"state/{name}": one for name, one in self.view.state().items()}
        self.checkpoints.save(self.step, tensors, {"step": str(self.step), "lines": json.dumps(self.lines)})

    @torch.no_grad()
    def _resume(self) -> bool:
        """Load the newest whole checkpoint; say whether there was one."""
        newest = self.checkpoints.newest(self.job.say)
        if newest is None:
            return False
        header, tensors = newest
        parts: dict[str, Weights] = {kind: {} for kind in PARTS}
        for path, tensor in tensors.items():
            kind, _, name = path.partition("/")
            parts[kind][name] = tensor
        self.step, self.lines = int(header["step"]), json.loads(header["lines"])
        held = (("master", self.trained), ("average", self.averages), ("fisher", self.fisher.sums))
        for kind, places in held:
            for name, place in places.items():
                place.copy_(parts[kind][name])
        restore(self.optimiser, self.trained, parts["optimiser"])
        self.view.restore(parts["state"])
        self.job.say(f"resumes at step {self.step}")
        return True


def set_determinism(asked: bool) -> None:
    """Choose torch's deterministic algorithms for this process, or its fastest."""
    torch.use_deterministic_algorithms(asked)
    # Filling fresh memory would cost a tenth of a step on a CPU, and nothing here reads it unwritten.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
