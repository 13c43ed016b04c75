"""The gates between a submission and its hand-in, each with the value seen, the limit and the margin."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from stages.profile import Limits, Selfcheck
from stages.rehearsal.review import review
from stages.rehearsal.wheels import wheel_faults
from stages.size import Survey, verdict
from stages.upstream.pins import Pin

REHEARSED = ("start", "smoke", "empty drafts", "failed requests", "serving time", "health after", "stop",
             "unchanged")
# The set whose replay stands for the held-out one, and its windows, from which the serving time is projected.
GRADED = "examples"
WINDOWS = "windows"
STOP_TIMEOUT_S = 20.0
# 143 is a shell's word for SIGTERM, -15 Python's.
CLEAN_EXITS = (0, 143, -15)
NAMED_AT_MOST = 5
# What the last words of a server that did not come up mean at the grader's.
HINTS = (
    (r"Read-only file system|Permission denied",
     "at the grader's it may write to /submission, /tmp and /opt/venv only"),
    (r"Network is unreachable|[Nn]ame resolution|Name or service not known|No address associated",
     "the grader has no network"),
)


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


def static_gates(found: Survey, limits: Limits, pins: Mapping[str, Pin]) -> list[Gate]:
    """Judge what can be seen without starting anything; `pins` is what lock/serve.txt has."""
    wrong, wheels = review(found), list(wheel_faults(found, pins))
    size = next((text for text in verdict(found, limits) if "over the limit" in text), "")
    links = [f"{name} {reason}" for name, reason in found.faults]
    return [
        _at_most("review", len(wrong), 0, _few(wrong, "declaration, evidence and sums are there and right")),
        _at_most("size", found.total_bytes, limits.limit_bytes, size or f"{len(found.files)} files"),
        _at_most("files", len(links), 0, _few(links, "every entry can be copied")),
        _at_most("wheels", len(wheels), 0, _few(wheels, "unmodified, and the grader's Python takes them")),
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
        return Gate("start", False, None, limit_s, None, _with_last_words(seen["reason"], seen["log_tail"]))
    return _at_most("start", seen["start_s"], limit_s, f"/health answered 200 after {seen['start_s']:.1f} s")


def _with_last_words(reason: str, log: list[str]) -> str:
    # serve.sh only says that the server went, and the line before it why.
    lines = [line.strip() for line in log if line.strip()]
    words = next((line for line in reversed(lines) if not line.startswith("serve.sh:")), (lines or [""])[-1])
    hints = [hint for pattern, hint in HINTS if re.search(pattern, "\n".join(log))]
    return "; ".join([reason, *([f"its last words: {words}"] if words else []), *hints])


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
    yield _serving_time(sets, rules)


def _serving_time(sets: dict[str, Any], rules: Selfcheck) -> Gate:
    """Scale the time of the windows to the held-out set as the contract does; compare the whole examples."""
    measured = sets.get(WINDOWS, sets[GRADED])
    seconds, whole = (_scaled(replay, rules.heldout_tokens) for replay in (measured, sets[GRADED]))
    text = (f"{measured['serving_seconds']:.1f} s for {measured['tokens']:,} tokens, "
            f"scaled to {rules.heldout_tokens:,}")
    if WINDOWS in sets and whole:
        text += f"; the whole examples scale to {whole:,.0f} s, so this is {seconds / whole - 1:+.0%} off"
    over = any(replay["over_budget"] for replay in sets.values())
    return _at_most("serving time", seconds, rules.budget_s, text, also=not over)


def _scaled(replay: dict[str, Any], tokens: int) -> float:
    return float(replay["serving_seconds"]) * tokens / max(int(replay["tokens"]), 1)


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
