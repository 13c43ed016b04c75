"""What QAT's forward pass sees: the masters as their codec would serve them, gradients straight through.

Straight-through estimation: Bengio et al., arXiv 1308.3432. Learned steps: Esser et al., arXiv 1902.08153.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter import codecs, weights
from drafter.codecs import Parts, Settings, lowrank
from drafter.codecs.entropy import LARGEST_CODE, code_bits
from drafter.codecs.rows import inverse
from drafter.config import ModelConfig
from drafter.model import EMBEDDING, HEAD
from stages.bits.planner import Packing, Planner, plan_of
from stages.bits.steps import LogSteps, to_steps
from stages.profile import Qat

Weights = dict[str, Tensor]
GROUP = 32
REPLAN_SHARE = 0.9  # of the steps, after which the grid moves once more
LOOK_STEPS = 25  # between looks at the rate
LOOK_WEIGHTS = 1 << 16  # of each matrix


@dataclass(frozen=True)
class Packed:
    """A finished drafter's plan and parts, and the exact bytes of its file."""

    plan: weights.Plan
    parts: Parts
    size_bytes: int


class RoundTripView:
    """Any codec whose grid follows from the weights themselves; a correction is found twice, by SVD.

    Args:
        plan: each tensor's settings.
        start: the weights, float32 on the device of training, for the first corrections.
    """

    def __init__(self, plan: weights.Plan, start: Weights) -> None:
        self.plan = plan
        self.factors: dict[str, Parts] = {}
        self._correct(start)

    @property
    def ranked(self) -> list[str]:
        """The tensors that have a correction."""
        return [name for name, settings in self.plan.items() if settings.get("rank")]

    def __call__(self, masters: Weights) -> Weights:
        """Return the stored values of the masters, bit for bit."""
        return {
            name: StraightThrough.apply(master, self.plan[name], self.factors.get(name))  # type: ignore[no-untyped-call]
            for name, master in masters.items()
        }

    def parameters(self) -> Weights:
        """Return nothing: the grid is not trained."""
        return {}

    def begin(self, step: int, steps: int, masters: Weights) -> dict[str, float]:
        """Find the corrections once more near the end."""
        if self.ranked and step == replan_step(steps):
            self._correct(masters)
        return {}

    def state(self) -> Weights:
        """Return the corrections' factors."""
        return {f"{side}/{name}": factor for name, pair in self.factors.items()
                for side, factor in pair.items()}  # fmt: skip

    def restore(self, state: Weights) -> None:
        """Take the factors of a run that stopped."""
        for path, factor in state.items():
            side, _, name = path.partition("/")
            self.factors[name][side].copy_(factor)

    def pack(self, config: ModelConfig, masters: Weights) -> Packed:
        """Encode finished masters."""
        parts = weights.encode(masters, self.plan, self.factors)
        return Packed(self.plan, parts, weights.size(config, self.plan, parts))

    def _correct(self, masters: Weights) -> None:
        for name in self.ranked:
            plain = {key: value for key, value in self.plan[name].items() if key not in ("rank", "zstd")}
            weight = masters[name].detach()
            try:
                residual = weight - codecs.round_trip(weight, plain)
            except ValueError as error:
                raise ValueError(f"tensor {name}: {error}") from error
            self.factors[name] = lowrank.factors(residual, self.plan[name]["rank"])


class EntropyView:
    """Uniform codes on planned steps, moved once near the end so that the finished file fits its allotment.

    Args:
        planner: of the drafter's allotment.
        start: the weights, float32 on the device of training.
        logs: their rows' log2 steps, up to a constant.
        learned: whether the rows' steps are trained; their mean stays, so that the rate does.
    """

    def __init__(self, planner: Planner, start: Weights, logs: LogSteps, learned: bool) -> None:
        self.planner, self.learned = planner, learned
        shift = planner.fit(start, logs).shift
        self.logs = {name: rows + shift for name, rows in logs.items()}
        self.moves = {
            name: torch.zeros_like(rows, requires_grad=True) for name, rows in self.logs.items()
        } if learned else {}  # fmt: skip
        self._settle()

    def __call__(self, masters: Weights) -> Weights:
        """Return codes times steps; vectors in bfloat16."""
        seen = {}
        for name, master in masters.items():
            if name not in self.steps:
                seen[name] = Nearest.apply(master)  # type: ignore[no-untyped-call]
            elif self.learned:
                seen[name] = learned_grid(master, self.logs[name], self.moves[name])
            else:
                seen[name] = Grid.apply(master, self.steps[name], self.inverses[name])  # type: ignore[no-untyped-call]
        return seen

    def parameters(self) -> Weights:
        """Return the rows' moves, log2, where they are learned."""
        return self.moves

    def begin(self, step: int, steps: int, masters: Weights) -> dict[str, float]:
        """Plan again near the end; now and then say the rate."""
        if step == replan_step(steps):
            return self._rate(self._refit(masters).size_bytes, masters)
        if step % LOOK_STEPS == 0:
            return self._rate(None, masters)
        return {}

    def state(self) -> Weights:
        """Return the rows' log2 steps."""
        return dict(self.logs)

    def restore(self, state: Weights) -> None:
        """Take the steps of a run that stopped."""
        for name, rows in state.items():
            self.logs[name].copy_(rows)
        self._settle()

    def pack(self, config: ModelConfig, masters: Weights) -> Packed:
        """Encode finished masters; the steps move once more if the file would miss its allotment."""
        packed = self._coded(config, masters)
        if self.planner.fits(packed.size_bytes):
            return packed
        self._refit(masters)
        # Coded anew: learned moves and a shift add up in another order there, and a step may round otherwise.
        return self._coded(config, masters)

    def _coded(self, config: ModelConfig, masters: Weights) -> Packed:
        plan = plan_of(masters)
        side = {name: {"steps": rows} for name, rows in self._effective_steps().items()}
        parts = weights.encode(masters, plan, side)
        return Packed(plan, parts, weights.size(config, plan, parts))

    def _refit(self, masters: Weights) -> Packing:
        effective = {name: effective_logs(rows, self.moves.get(name)) for name, rows in self.logs.items()}
        packing = self.planner.fit(masters, effective)
        torch._foreach_add_(list(self.logs.values()), packing.shift)
        self._settle()
        return packing

    def _settle(self) -> None:
        stored = {name: to_steps(rows) for name, rows in self.logs.items()}
        if not hasattr(self, "steps"):
            self.steps = {name: rows.float()[:, None] for name, rows in stored.items()}
            self.inverses = {name: inverse(rows)[:, None] for name, rows in stored.items()}
        for name, rows in stored.items():  # in place: what was compiled keeps its addresses
            self.steps[name].copy_(rows.float()[:, None])
            self.inverses[name].copy_(inverse(rows)[:, None])

    @torch.no_grad()
    def _effective_steps(self) -> dict[str, Tensor]:
        return {name: to_steps(effective_logs(rows, self.moves.get(name)))
                for name, rows in self.logs.items()}  # fmt: skip

    @torch.no_grad()
    def _rate(self, size_bytes: int | None, masters: Weights) -> dict[str, float]:
        bits = total = 0.0
        for name, steps in self._effective_steps().items():
            stride = max(1, masters[name].numel() // LOOK_WEIGHTS)
            codes = (masters[name][::stride] * inverse(steps)[::stride, None]).round_()
            bits += code_bits(codes) * len(steps) / len(codes)
            total += masters[name].numel()
        rate = {"bits_per_weight": round(bits / total, 4)}
        return rate if size_bytes is None else rate | {"packed_bytes": size_bytes}


View = RoundTripView | EntropyView


def replan_step(steps: int) -> int:
    """The step before which grids move for the last time."""
    return int(REPLAN_SHARE * steps)


def fixed_plan(tensors: Mapping[str, Tensor], settings: Qat) -> weights.Plan:
    """Plan a fixed-rate codec: matrices by `codec` (embeddings by `codec_embedding`), vectors in bfloat16."""
    plan: weights.Plan = {}
    for name in sorted(tensors):
        entry: Settings = {"codec": "bf16", "shape": list(tensors[name].shape)}
        if tensors[name].ndim == 2:
            embedding = name in (EMBEDDING, HEAD)
            entry["codec"] = (settings.codec_embedding if embedding else None) or settings.codec
            if entry["codec"] in ("int4", "nf4"):
                entry["group"] = settings.group or GROUP
            if entry["codec"] == "int4" and settings.clip:
                entry["clip"] = True
            if settings.rank and not embedding:  # there it would cost a factor's row for every token
                entry["rank"] = min(settings.rank, *tensors[name].shape)
            if settings.zstd:
                entry["zstd"] = settings.zstd
        plan[name] = entry
    return plan


class StraightThrough(torch.autograd.Function):
    """Any codec's rounding on the way forward, and the identity on the way back."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, settings: Settings, side: Parts | None) -> Tensor:
        """Return the stored value of a master, bit for bit."""
        plain = {key: value for key, value in settings.items() if key != "zstd"}  # lossless, so left out
        return codecs.round_trip(master, plain, side)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Pass the gradient on as it is."""
        return gradient, None, None


class Nearest(torch.autograd.Function):
    """bfloat16 on the way forward, the identity on the way back."""

    @staticmethod
    def forward(ctx: Any, master: Tensor) -> Tensor:
        """Round to the nearest bfloat16, float32."""
        return master.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient on as it is."""
        return gradient


class Grid(torch.autograd.Function):
    """Codes times steps on the way forward, the identity on the way back."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, steps: Tensor, inverses: Tensor) -> Tensor:
        """Round a matrix, [rows, columns], to its rows' steps, [rows, 1]."""
        return (master * inverses).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).mul_(steps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Pass the gradient on as it is."""
        return gradient, None, None


def effective_logs(logs: Tensor, moves: Tensor | None) -> Tensor:
    """Return log2 steps with their learned moves, less the moves' mean."""
    return logs if moves is None else logs + (moves - moves.mean()).detach()


def learned_grid(master: Tensor, logs: Tensor, moves: Tensor) -> Tensor:
    """Return codes times steps; the gradient of a step is code - weight / step, summed over its row."""
    log = logs + (moves - moves.mean())
    smooth = log.exp2()[:, None]
    stored = to_steps(effective_logs(logs, moves))
    scaled = (master * inverse(stored)[:, None]).detach()
    codes = scaled.round().clamp(-LARGEST_CODE, LARGEST_CODE)
    # x - x is exactly 0, so that what is seen is what is stored, bit for bit.
    slope = (codes - scaled) * (smooth - smooth.detach())
    return codes * stored.float()[:, None] + (master - master.detach()) + slope
