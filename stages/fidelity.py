"""Fidelity: how far the teacher reproduces the continuations that evaluation conversations come with.

The target wrote them elsewhere. Where template, compute type or stop rule are not the same here, greedy text
soon takes another way, and all that the teacher goes on to write is another target's.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import read_json

GATE = "dev"  # the set for choosing; nothing is ever decided on another


def file_of(folder: Path, name: str) -> Path:
    """Return where the fidelity on an evaluation set is kept."""
    return folder / f"fidelity-{name}.json"


def agreement(given: Sequence[Sequence[int]], found: Sequence[Sequence[int]], most: int) -> dict[str, Any]:
    """Compare continuations with the teacher's own for the same prompts, none empty.

    Args:
        given: token ids as the conversations came with them; what is beyond `most` tokens is not compared.
        found: the teacher's.
        most: the teacher's cap.

    Returns:
        `conversations`; `whole`: how many are the same to their ends; `whole_share`; `prefix_share`: the mean
        share of a given continuation's tokens before the first that differs.
    """
    pairs = [(list(one[:most]), list(other)) for one, other in zip(given, found, strict=True)]
    whole = sum(one == other for one, other in pairs)
    share = sum(_same(one, other) / len(one) for one, other in pairs) / len(pairs)
    return {"conversations": len(pairs), "whole": whole, "whole_share": round(whole / len(pairs), 4),
            "prefix_share": round(share, 4)}  # fmt: skip


def told(name: str, fidelity: dict[str, Any]) -> str:
    """Return the fidelity on a set as a sentence."""
    return (f"fidelity on {name}: {fidelity['prefix_share']:.1%} of a given continuation's tokens reproduced "
            f"before the first difference (mean of {fidelity['conversations']}), {fidelity['whole']} "
            "reproduced whole")


def read_fidelity(folder: Path, sets: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the fidelity on each set that came with continuations."""
    return {name: read_json(path) for name in sets if (path := file_of(folder, name)).is_file()}


def check_fidelity(folder: Path, least: float) -> None:
    """Go on only if the fidelity on dev, where it is known, is at least so much.

    Raises:
        UserError: it is less.
    """
    for name, fidelity in read_fidelity(folder, [GATE]).items():
        if fidelity["prefix_share"] < least:
            raise UserError(
                f"{told(name, fidelity)}: less than teacher.min_fidelity ({least}), so nothing more is "
                "written. Compare target.template_arguments, teacher.dtype, target.stop_ids and "
                "teacher.stop_on_repeat with how these continuations were made, or lower the threshold")


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are the same before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
