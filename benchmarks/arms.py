"""Arms of a bench: which drafter is made, from which rows, by which codec."""

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.workers import Line
from stages.profile import Distill, Qat

SETS = {"a": "heldout", "b": "dev"}  # files of the teacher
PLAIN: dict[str, Any] = {"codec_embedding": None, "group": None, "clip": False, "rank": 0, "zstd": 0,
                         "fisher_exponent": 1.0, "learn_steps": False}  # fmt: skip
CODECS: dict[str, dict[str, Any]] = {
    "the profile's": {},
    "int4 g32": PLAIN | {"codec": "int4", "group": 32},
    "int4 g32 clipped": PLAIN | {"codec": "int4", "group": 32, "clip": True},
    "int4 g32 clipped, half the rate": PLAIN | {"codec": "int4", "group": 32, "clip": True,
                                                "learning_rate": 4e-4},
    "int4 g64 clipped": PLAIN | {"codec": "int4", "group": 64, "clip": True},
    "nf4 g64 + rank 32": PLAIN | {"codec": "nf4", "group": 64, "rank": 32},
    "entropy": PLAIN | {"codec": "entropy"},
    "entropy by half Fisher": PLAIN | {"codec": "entropy", "fisher_exponent": 0.5},
    "entropy by row rms": PLAIN | {"codec": "entropy", "fisher_exponent": 0.0},
}


@dataclass(frozen=True)
class Arm:
    """One drafter to be made.

    Attributes:
        codec: a name of CODECS.
        layers: how many are kept, those of largest block influence.
        size_bytes: what its file may take.
        seconds: of training; 0 where steps are given.
        steps: of training; 0 where seconds are given.
        seed: of the order of rows.
        sources: which rows it is trained on: "all", "only X", or "all but X".
    """

    codec: str
    layers: int
    size_bytes: int
    seconds: float = 0.0
    steps: int = 0
    seed: int = 0
    sources: str = "all"


def arm_of(line: Line) -> Arm:
    """Return the arm that a line is of."""
    return Arm(**{name: line[name] for name in Arm.__dataclass_fields__})


def told(line: Line) -> str:
    """Say what an arm gave."""
    tau = "  ".join(f"({name}) {line[f'tau_{name}']['tau']:.3f} ({line[f'tau_{name}']['low']:.3f} to "
                    f"{line[f'tau_{name}']['high']:.3f})" for name in SETS)  # fmt: skip
    return (f"{line['codec']} x {line['layers']}, {line['sources']}, seed {line['seed']}: "
            f"{line['file_bytes']:,} bytes, {line['bits_per_weight']:.3f} bits; {line['train_s']:.1f} s, "
            f"{line['distill_steps']} + {line['qat_steps']} steps, {line['tokens'] / 1e6:.1f}M tokens; {tau}")


def section(original: Any, changes: dict[str, Any]) -> Any:
    """Return a profile's section with changes, checked as a profile is."""
    kind = Qat if isinstance(original, Qat) else Distill
    merged = original.model_dump(mode="json") | changes
    merged["warmup_steps"] = min(merged["warmup_steps"], merged["steps"] // 4)
    return kind.model_validate_json(json.dumps(merged))
