"""The gates between a submission and its hand-in, each with the value seen, the limit and the margin."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from stages.profile import Limits, Selfcheck
from stages.rehearsal.review import review
from stages.size import Survey, verdict

REHEARSED = ("start", "smoke", "empty drafts", "failed requests", "serving time", "health after", "stop",
             "unchanged")
# The set whose replay stands for the held-out one.
GRADED = "examples"
STOP_TIMEOUT_S = 20.0
# 143 is a shell's word for SIGTERM, -15 Python's.
CLEAN_EXITS = (0, 143, -15)
NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Gate:
    """One requirement.

    Attributes:
        name: one word or two.
        passed: None where the rehearsal did not get that far.
        value, limit: what was seen, and what is allowed.
        margin: how far the value is inside the limit, where both are numbers; negative outside.
        text: a sentence, for people.
    """

    name: str
    passed: bool | None
    value: float | None
    limit: float | None
    margin: float | None
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def _at_most(name: str, value: float, limit: float, text: str, also: bool = True) -> Gate:
    return Gate(name, value <= limit and also, value, limit, limit - value, text)


def _few(sentences: list[str], otherwise: str) -> str:
    more = len(sentences) - NAMED_AT_MOST
    shown = "; ".join(sentences[:NAMED_AT_MOST])
    return (shown + (f"; and {more} more" if more > 0 else "")) or otherwise


def static_gates(found: Survey, limits: Limits) -> list[Gate]:
    """Judge what can be seen without starting anything."""
    wrong = review(found)
    size = next((text for text in verdict(found, limits) if "over the limit" in text), "")
    links = [f"{name} {reason}" for name, reason in found.faults]
    return [
        _at_most("review", len(wrong), 0, _few(wrong, "declaration, evidence and sums are there and right")),
        _at_most("size", found.total_bytes, limits.limit_bytes, size or f"{len(found.files)} files"),
        _at_most("files", len(links), 0, _few(links, "every entry can be copied")),
    ]


def rehearsal_gates(seen: dict[str, Any] | None, rules: Selfcheck) -> list[Gate]:
    """Judge what `scenes.rehearse` saw (None: it was not held); what was not reached stays open."""
    found = {gate.name: gate for gate in _judged(seen or {}, rules)}
    return [found.get(name) or Gate(name, None, None, None, None, "not reached") for name in REHEARSED]


def _judged(seen: dict[str, Any], rules: Selfcheck) -> Iterator[Gate]:
    if seen:
        yield _start(seen, rules.start_timeout_s)
        yield _unchanged(seen["changed"])
    if "smoke" in seen:
        yield _smoke(seen["smoke"])
        yield _stop(seen["stop"])
    if "health" in seen:
        yield from _replays(seen["sets"], rules)
        status = seen["health"]
        text = f"/health answered {status}" if status else "nobody answered /health"
        yield Gate("health after", status == 200, status, 200, None, text)


def _start(seen: dict[str, Any], limit_s: float) -> Gate:
    if "start_s" not in seen:
        return Gate("start", False, None, limit_s, None, seen["reason"])
    return _at_most("start", seen["start_s"], limit_s, f"/health answered 200 after {seen['start_s']:.1f} s")


def _smoke(smoke: dict[str, Any]) -> Gate:
    drafted = len(smoke["draft"] or [])
    text = smoke["reason"] or f"{drafted} ids after {smoke['seconds']:.2f} s"
    return Gate("smoke", drafted >= 1, drafted, 1, drafted - 1, text)


def _replays(sets: dict[str, Any], rules: Selfcheck) -> Iterator[Gate]:
    """Judge empties and failures on every set, and the time on the examples."""
    empties = sum(replay["empties"] for replay in sets.values())
    asked = sum(replay["requests"] for replay in sets.values())
    yield _at_most("empty drafts", empties, 0, f"{empties} empty drafts in {asked:,} requests")
    worst = max(sets.values(), key=lambda replay: float(replay["failure_share"]))
    kinds = ", ".join(f"{count} {kind}" for kind, count in worst["failures"].items()) or "no failure"
    text = f"{kinds} in {worst['requests']:,} requests"
    if worst["gave_up"]:
        text += "; gave up: nobody answers"
    yield _at_most("failed requests", worst["failure_share"], rules.failure_share,
                   "; ".join([text, *worst["reasons"][:1]]), also=not worst["gave_up"])
    graded = sets[GRADED]
    seconds = graded["serving_seconds"] * rules.heldout_tokens / max(graded["tokens"], 1)
    yield _at_most("serving time", seconds, rules.budget_s,
                   f"{graded['serving_seconds']:.1f} s for {graded['tokens']:,} tokens, "
                   f"scaled to {rules.heldout_tokens:,}", also=not graded["over_budget"])


def _stop(stop: dict[str, Any]) -> Gate:
    clean = stop["code"] in CLEAN_EXITS and not stop["left"] and not stop["ended_before"]
    text = f"ended with code {stop['code']}, {stop['seconds']:.1f} s after SIGTERM"
    if stop["ended_before"]:
        text = f"had ended with code {stop['code']} before it was told to"
    elif stop["code"] is None:
        text = f"still running {stop['seconds']:.1f} s after SIGTERM"
    elif stop["left"]:
        text += f"; {stop['left']} of its processes were left running"
    return _at_most("stop", stop["seconds"], STOP_TIMEOUT_S, text, also=clean)


def _unchanged(changed: list[str]) -> Gate:
    sentences = [f"{name} was added, changed or removed while serving" for name in changed]
    return _at_most("unchanged", len(changed), 0, _few(sentences, "serving left the folder as it was"))


def gate_table(gates: Iterable[Gate]) -> Table:
    """Return the gates for people."""
    sheet = Table("gate", "", "value", "limit", "margin", "what was seen", title="selfcheck")
    for column in sheet.columns[2:5]:
        column.justify = "right"
    for gate in gates:
        mark = {True: "[green]passed", False: "[red]FAILED", None: "[yellow]open"}[gate.passed]
        numbers = map(_number, (gate.value, gate.limit, gate.margin))
        sheet.add_row(gate.name, mark, *numbers, escape(gate.text))
    return sheet


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")
