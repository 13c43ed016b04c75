"""One knob, bytes: a constant is added to all log steps so that the really coded file fits the allotment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter import weights
from drafter.codecs.entropy import code_bits, to_codes
from drafter.config import ModelConfig
from stages.bits.bases import bits_per_weight, overhead_bytes
from stages.bits.steps import LogSteps, to_steps
from stages.errors import UserError

LEAST_SHARE = 0.995  # of the allotment that is spent
AIM_SHARE = 0.998
SAMPLE_WEIGHTS = 1 << 16  # of each matrix, for estimates
CLOSE = 2e-4  # of the bytes, for estimates
LOOKS = 40  # at estimates, for one shift
PLAIN_BITS = 2.05  # of codes whose step is their rms
BY_ESTIMATE = 4  # attempts
ATTEMPTS = 12
NEAR = 0.01
LEAST_BITS = 0.1  # a weight; below, next to nothing is left of a matrix
MOST_BITS = 9  # a weight, about, at the finest: finer codes would not be told apart by the estimate
FINEST, COARSEST = -7.0, 8.0  # log2 of a step over its row's rms, on the average of all weights


@dataclass(frozen=True)
class Packing:
    """A plan, and what it gave.

    Attributes:
        plan: each tensor's settings.
        parts: the coded tensors.
        shift: what was added to all log2 steps.
        size_bytes: of the whole file.
    """

    plan: weights.Plan
    parts: dict[str, Tensor]
    shift: float
    size_bytes: int


def plan_of(tensors: Mapping[str, Tensor]) -> weights.Plan:
    """Plan the entropy codec for matrices, and bfloat16 for vectors."""
    return {
        name: {"codec": "entropy" if tensors[name].ndim == 2 else "bf16", "shape": list(tensors[name].shape)}
        for name in sorted(tensors)
    }


def encode(config: ModelConfig, tensors: Mapping[str, Tensor], logs: LogSteps, shift: float) -> Packing:
    """Code all tensors with their steps moved by a shift, and weigh the file."""
    plan = plan_of(tensors)
    side = {name: {"steps": to_steps(rows, shift)} for name, rows in logs.items()}
    parts = weights.encode(tensors, plan, side)
    return Packing(plan, parts, shift, weights.size(config, plan, parts))


class Planner:
    """Finds the shift for weights of one shape.

    Args:
        config: the drafter's shape.
        allotment_bytes: what the whole file may take.
        say: told what was tried.
    """

    def __init__(self, config: ModelConfig, allotment_bytes: int,
                 say: Callable[[str], None] = lambda _text: None) -> None:
        self.config, self.allotment_bytes, self.say = config, allotment_bytes, say

    def fit(self, tensors: Mapping[str, Tensor], logs: LogSteps) -> Packing:
        """Return a packing of 99.5 to 100% of the allotment, from its estimate and then from real sizes.

        A model of a few thousand weights may have none in that range; then the largest that fits is taken.

        Raises:
            UserError: the allotment is too small for norms, steps and header, or larger than codes of
                MOST_BITS a weight.
        """
        self._check_floor()
        search = _Search(_samples(tensors, logs), AIM_SHARE * self.allotment_bytes)
        best: Packing | None = None
        for _ in range(ATTEMPTS):
            shift = search.next()
            if shift - search.finest < NEAR:
                raise UserError(
                    f"the allotment of {self.allotment_bytes} bytes is over {MOST_BITS} bits a weight: "
                    "keep more start.layers, lower limits.limit_bytes, or use qat.codec = 'bf16'"
                )
            packing = encode(self.config, tensors, logs, shift)
            share = packing.size_bytes / self.allotment_bytes
            self.say(f"planned {packing.size_bytes} bytes, {share:.4f} of the allotment")
            if self.fits(packing.size_bytes):
                return packing
            if share < 1 and (best is None or best.size_bytes < packing.size_bytes):
                best = packing
            search.learn(shift, packing.size_bytes)
        if best is None:
            raise UserError(f"no steps were found that fit {self.allotment_bytes} bytes; raise "
                            "limits.limit_bytes")
        return best

    def fits(self, size_bytes: int) -> bool:
        """Whether a file of this size is 99.5 to 100% of the allotment."""
        return LEAST_SHARE * self.allotment_bytes <= size_bytes <= self.allotment_bytes

    def _check_floor(self) -> None:
        if bits_per_weight(self.config, self.allotment_bytes) < LEAST_BITS:
            raise UserError(
                f"norms, steps and header alone take about {overhead_bytes(self.config)} bytes, of an "
                f"allotment of {self.allotment_bytes} (limits.limit_bytes less reserve_bytes); keep fewer "
                "start.layers or raise the limit"
            )


@dataclass(frozen=True)
class Sample:
    """Some rows of a matrix, and by how much the whole is more."""

    weight: Tensor
    logs: Tensor
    scale: float


def estimated_bytes(samples: list[Sample], shift: float) -> float:
    """Estimate the bytes of all codes and steps from samples."""
    total = 0.0
    for sample in samples:
        codes = to_codes(sample.weight, to_steps(sample.logs, shift))
        total += sample.scale * (code_bits(codes) / 8 + 2 * len(codes))
    return total


def _samples(tensors: Mapping[str, Tensor], logs: LogSteps) -> list[Sample]:
    found = []
    for name, rows in logs.items():
        weight = tensors[name]
        stride = max(1, weight.numel() // SAMPLE_WEIGHTS)
        chosen = weight[::stride].float().contiguous()  # a view would keep the whole in memory
        found.append(Sample(chosen, rows.to(chosen.device)[::stride], len(weight) / len(chosen)))
    return found


class _Search:
    """Looks for the shift whose file has the size aimed at; more shift, fewer bytes.

    Estimates go by the secant method between bounds that real sizes have set.
    """

    def __init__(self, samples: list[Sample], aim_bytes: float) -> None:
        self.samples, self.aim_bytes = samples, aim_bytes
        count = max(1.0, sum(sample.scale * sample.weight.numel() for sample in samples))
        even = _even_shift(samples)
        self.finest = self.low = even + FINEST
        self.high = even + COARSEST
        self.guess = even + PLAIN_BITS - 8 * aim_bytes / count
        self.slope = -count / 8  # bytes a doubling of the steps: a bit a weight at first
        self.looked: tuple[float, float] | None = None  # the last shift and its estimate
        self.beyond = 0.0  # bytes that the file has and the estimate has not
        self.tried = 0

    def next(self) -> float:
        """Return the shift to try: by the estimate at first, then by halves."""
        self.tried += 1
        if self.tried > BY_ESTIMATE:
            return (self.low + self.high) / 2
        low, high, guess = self.low, self.high, self.guess
        for _ in range(LOOKS):
            shift = guess if low < guess < high else (low + high) / 2
            missed = self._estimate(shift) + self.beyond - self.aim_bytes
            if abs(missed) < CLOSE * self.aim_bytes:
                break
            low, high = (shift, high) if missed > 0 else (low, shift)
            guess = shift - missed / self.slope
        return shift

    def learn(self, shift: float, size_bytes: int) -> None:
        """Take note of a real size."""
        missed = size_bytes - self.aim_bytes
        if missed > 0:
            self.low = shift
        else:
            self.high = shift
        self.beyond = size_bytes - self._estimate(shift)
        self.guess = shift - missed / self.slope

    def _estimate(self, shift: float) -> float:
        if self.looked and self.looked[0] == shift:
            return self.looked[1]
        found = estimated_bytes(self.samples, shift)
        if self.looked and (slope := (found - self.looked[1]) / (shift - self.looked[0])) < 0:
            self.slope = slope
        self.looked = shift, found
        return found


def _even_shift(samples: list[Sample]) -> float:
    """The shift at which steps are as large as the rows' rms, on the average of weights that are not 0."""
    total = weighed = 0.0
    for sample in samples:
        rms = sample.weight.square().mean(1).sqrt()
        share = sample.scale * sample.weight.shape[1]
        total += share * float(torch.where(rms > 0, rms.log2() - sample.logs, 0).sum())
        weighed += share * int((rms > 0).sum())
    return total / weighed if weighed else 0.0
