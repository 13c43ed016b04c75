"""The training loop that distill and qat share: fixed work, checkpoints, exact resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from drafter.config import ModelConfig
from drafter.model import EMBEDDING, HEAD, Decoder
from drafter.replay import Conversation, Tau, simulate, summary
from stages.errors import UserError
from stages.job import Job
from stages.models.target import DTYPES
from stages.training.batches import Batch, Schedule, collate, trainable
from stages.training.loss import Loss, learning_rate, loss
from stages.training.shards import Row

Weights = dict[str, Tensor]
BETAS = (0.9, 0.95)
EMBEDDINGS = (EMBEDDING, HEAD)


class Trainer:
    """Trains a drafter's float32 masters for a fixed number of steps.

    Args:
        job: the stage's job; checkpoints go to its work folder.
        settings: the stage's Training section.
        config: the drafter's shape.
        start: its tensors under transformers' names, any floating type.
        view: what the forward pass sees of the masters, e.g. their rounding; gradients pass through it.
    """

    def __init__(self, job: Job, settings: Any, config: ModelConfig, start: Weights,
                 view: Callable[[Weights], Weights] = lambda weights: weights) -> None:
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory would cost a tenth of a step on a CPU, and nothing here reads it unwritten.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.job, self.settings, self.config, self.view = job, settings, config, view
        self.dtype = DTYPES[settings.dtype]
        placed = {name: start[name].float().to(job.device).clone() for name in sorted(start)}
        frozen = () if settings.train_embedding else EMBEDDINGS
        self.masters = {name: placed[name].requires_grad_() for name in placed if name not in frozen}
        self.frozen = {name: placed[name] for name in placed if name in frozen}
        self.frozen_seen = self._seen(self.frozen)
        self.optimiser = torch.optim.AdamW(
            self.masters.values(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.0
        )
        with torch.device("meta"):
            self.decoder = Decoder(config)
        self.step = 0
        self.lines: list[dict[str, Any]] = []

    def train(self, rows: list[Row], dev: list[Conversation]) -> dict[str, Any]:
        """Run to the last step, resuming from the newest checkpoint, and return the metrics.

        Args:
            rows: training rows.
            dev: conversations on which tau is simulated before and after.
        """
        kept, dropped = trainable(rows, self.settings.max_row_tokens)
        sizes = [len(row.prompt) + len(row.continuation) for row in kept]
        schedule = Schedule(sizes, self.settings.batch_rows, self.job.seed)
        if not self._resume():
            self._log(step=0, tau_dev=round(self.tau(dev).tau, 4))
        self.job.say(f"{len(kept)} rows of {sum(sizes)} tokens; {dropped} rows without a token to predict")
        remaining = range(self.step, self.settings.steps)
        for step in self.job.progress(remaining, self.settings.steps, unit="step", start=self.step):
            self._train_step(collate([kept[row] for row in schedule.rows(step)]).to(self.job.device))
            if self.step % self.settings.checkpoint_steps == 0 or self.step == self.settings.steps:
                self._save()
        final = self.tau(dev)
        self.job.say(f"simulated tau on dev: {self.lines[0]['tau_dev']:.3f} before, {final.tau:.3f} after")
        self._log(step=self.step, tau_dev=round(final.tau, 4))
        tokens = sum(line.get("positions", 0) for line in self.lines)
        return {
            "rows": len(kept),
            "rows_dropped": dropped,
            "target_tokens": sum(len(row.continuation) for row in kept),
            "positions_trained": tokens,
            "tau_dev_before": self.lines[0]["tau_dev"],
            "tau_dev": final.to_json(),
        }

    def finished(self) -> Weights:
        """Return all weights at full precision: the masters, detached, and what was never trained."""
        return self.frozen | {name: master.detach() for name, master in self.masters.items()}

    def sensitivities(self) -> Weights:
        """Return for each trained matrix its rows' mean squared gradient (Adam's v), float32, [rows]."""
        return {
            name: self.optimiser.state[master]["exp_avg_sq"].mean(dim=1)
            for name, master in self.masters.items()
            if master.ndim == 2
        }

    @torch.no_grad()
    def tau(self, conversations: list[Conversation]) -> Tau:
        """Simulate tau from one teacher-forced pass over each conversation."""
        weights = self._weights()
        steps = []
        for conversation in conversations:
            text = [*conversation.prompt, *conversation.continuation[:-1]]
            hidden_btd = self._hidden(weights, torch.tensor([text], device=self.job.device))
            hidden_td = hidden_btd[0, len(conversation.prompt) - 1 :]
            choice_t = self._logits(weights, hidden_td).argmax(-1).cpu()
            steps.append(simulate(choice_t == torch.tensor(conversation.continuation)))
        return summary(conversations, steps)

    def _weights(self) -> Weights:
        return self.frozen_seen | self._seen(self.masters)

    def _seen(self, weights: Weights) -> Weights:
        """What the forward pass sees: matrices in the compute type; norms stay float32."""
        seen = self.view(weights)
        return {name: seen[name].to(self.dtype) if seen[name].ndim == 2 else seen[name] for name in seen}

    def _hidden(self, weights: Weights, tokens_bt: Tensor) -> Tensor:
        positions_1t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)[None]
        hidden: Tensor = functional_call(self.decoder, weights, (tokens_bt, positions_1t))
        return hidden

    def _logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        return hidden @ weights[EMBEDDING if self.config.tied else HEAD].T

    def _train_step(self, batch: Batch) -> None:
        rate = learning_rate(
            self.step, self.settings.steps, self.settings.warmup_steps, self.settings.learning_rate
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        result = self._backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.settings.clip_norm)
        if not torch.isfinite(norm + result.total.detach()):
            raise UserError(
                f"step {self.step + 1}: the loss ({float(result.total.detach())}) or its gradient's norm "
                f"({float(norm)}) is not finite; lower learning_rate"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        values = {"loss": result.total, "ce": result.ce, "kl": result.kl}
        rounded = {name: round(float(value.detach()), 5) for name, value in values.items()}
        self._log(step=self.step, positions=result.positions, rate=rate, **rounded)

    def _backward(self, batch: Batch) -> Loss:
        weights = self._weights()
        hidden_nd = self._hidden(weights, batch.tokens_bt).flatten(0, 1)[batch.predictors_n]
        logits_nv = self._logits(weights, hidden_nd)
        result = loss(
            logits_nv, batch.targets_n, batch.topk_ids_nk, batch.topk_logprobs_nk, self.settings.ce_share
        )
        result.total.backward()  # type: ignore[no-untyped-call]
        return result

    def _log(self, **line: Any) -> None:
        self.lines.append(line)

    def _save(self) -> None:
        """Write a checkpoint, then remove those before it; a kill in between leaves a whole one."""
        tensors = {}
        for name, master in self.masters.items():
            state = self.optimiser.state[master]
            tensors[f"master/{name}"] = master.detach()
            tensors[f"first/{name}"] = state["exp_avg"]
            tensors[f"second/{name}"] = state["exp_avg_sq"]
        path = self.job.work / f"checkpoint-{self.step:08d}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"step": str(self.step), "lines": json.dumps(self.lines)})
        older = self._checkpoints()
        partial.rename(path)
        for old in older:
            old.unlink()

    def _checkpoints(self) -> list[Path]:
        return sorted(self.job.work.glob("checkpoint-*.safetensors"))

    def _resume(self) -> bool:
        """Load the newest whole checkpoint; say whether there was one."""
        for path in reversed(self._checkpoints()):
            try:
                with safe_open(path, framework="pt") as stored:
                    header = stored.metadata()
                tensors = load_file(path, device=self.job.device)
            except (SafetensorError, OSError):
                path.unlink()
                continue
            self.step, self.lines = int(header["step"]), json.loads(header["lines"])
            for name, master in self.masters.items():
                with torch.no_grad():
                    master.copy_(tensors[f"master/{name}"])
                self.optimiser.state[master] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": tensors[f"first/{name}"],
                    "exp_avg_sq": tensors[f"second/{name}"],
                }
            self.job.say(f"resumes at step {self.step}")
            return True
        return False
