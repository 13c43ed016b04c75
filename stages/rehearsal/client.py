"""The grader's client: conversations replayed over HTTP, with its time-outs, retries and budget."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from drafter.replay import DRAFT_TOKENS, Conversation, Steps, rounds

# After so many failed requests without one answer between them the server is taken for gone.
GIVE_UP_AFTER = 100
REASONS_KEPT = 5


class RequestError(Exception):
    """A request that failed: `kind` is late, reset, connection, status or answer; the text says why."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Terms:
    """How the grader asks: seconds, and how many at once; times are of single requests."""

    in_flight: int = 32
    request_timeout_s: float = 60.0
    retries: int = 2
    budget_s: float = 10800.0


@dataclass
class Replayed:
    """A replay over HTTP and what was seen on the way.

    Attributes:
        steps: for each conversation, its verification steps.
        requests: requests sent, retries among them.
        failures: failed requests by kind; `reset` (the connection was dropped) stands apart from `answer`.
        reasons: the first few failures in words.
        lost_steps: steps that went on with an empty draft because no request for them succeeded.
        empties: requests answered 200 with no id although the continuation went on.
        serving_seconds: from the first request to the last answer; some request is in flight all the time.
        request_seconds: the sum of all requests' times, those in flight together each counted.
        latencies_s: the time of each request.
        over_budget, gave_up: the replay stopped asking: the budget was spent; the server was gone.
    """

    steps: list[Steps] = field(default_factory=list)
    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    lost_steps: int = 0
    empties: int = 0
    serving_seconds: float = 0.0
    request_seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    over_budget: bool = False
    gave_up: bool = False

    @property
    def failure_share(self) -> float:
        """Failed requests per request sent."""
        return self.failures.total() / self.requests if self.requests else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return counts and times (not the steps) as plain values."""
        points = np.quantile(self.latencies_s or [0.0], (0.5, 0.95, 1.0)).round(4).tolist()
        return {
            "requests": self.requests,
            "failures": dict(sorted(self.failures.items())),
            "failure_share": self.failure_share,
            "reasons": self.reasons,
            "lost_steps": self.lost_steps,
            "empties": self.empties,
            "serving_seconds": round(self.serving_seconds, 3),
            "request_seconds": round(self.request_seconds, 3),
            "latency_s": dict(zip(("p50", "p95", "max"), points, strict=True)),
            "over_budget": self.over_budget,
            "gave_up": self.gave_up,
        }


def replay_http(
    conversations: Sequence[Conversation],
    base_url: str,
    terms: Terms | None = None,
    advance: Callable[[int], object] | None = None,
) -> Replayed:
    """Replay conversations against a running server, each with one request in flight.

    A late request has failed, is not tried again, and counts its whole time; other failures are tried again.
    A step without an answer goes on with an empty draft.

    Args:
        conversations: what to replay.
        base_url: such as 'http://127.0.0.1:8000'.
        terms: the grader's terms.
        advance: told how many tokens of continuation each step covered.
    """
    return asyncio.run(_replay(conversations, base_url, terms or Terms(), advance or (lambda tokens: None)))


async def _replay(
    conversations: Sequence[Conversation], base_url: str, terms: Terms, advance: Callable[[int], object]
) -> Replayed:
    replayed = Replayed()
    steps: list[Steps | None] = [None] * len(conversations)
    waiting = iter(enumerate(conversations))
    limits = httpx.Limits(max_connections=terms.in_flight, max_keepalive_connections=terms.in_flight)
    # The time-out is ours and covers the whole request; httpx's would start anew with every byte.
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False) as client:  # noqa: S113
        asker = _Asker(client, terms, replayed)

        async def worker() -> None:
            for index, conversation in waiting:
                steps[index] = await asker.replay(conversation, advance)

        await asyncio.gather(*(worker() for _ in range(min(terms.in_flight, len(conversations)))))
        replayed.serving_seconds = time.perf_counter() - asker.started
    replayed.steps = [found for found in steps if found is not None]
    return replayed


@dataclass
class _Asker:
    """Sends requests and keeps the tally."""

    client: httpx.AsyncClient
    terms: Terms
    tally: Replayed
    failed_in_a_row: int = 0
    started: float = field(default_factory=time.perf_counter)

    async def replay(self, conversation: Conversation, advance: Callable[[int], object]) -> Steps:
        loop = rounds(conversation.prompt, conversation.continuation)
        try:
            context = next(loop)
            while True:
                before = len(context)
                context = loop.send(await self.draft(context))
                advance(len(context) - before)
        except StopIteration as end:
            steps: Steps = end.value
            if steps.tokens:
                advance(steps.tokens + len(conversation.prompt) - before)
            return steps

    async def draft(self, context: list[int]) -> list[int]:
        """Return the draft for one step: empty when no request for it succeeds."""
        for _ in range(1 + self.terms.retries):
            self.tally.over_budget |= time.perf_counter() - self.started >= self.terms.budget_s
            self.tally.gave_up |= self.failed_in_a_row >= GIVE_UP_AFTER
            if self.tally.over_budget or self.tally.gave_up:
                break
            try:
                draft = await self._timed(context)
            except RequestError as failure:
                self._note(failure)
                if failure.kind == "late":
                    break
            else:
                self.failed_in_a_row = 0
                self.tally.empties += not draft
                return draft
        self.tally.lost_steps += 1
        return []

    async def _timed(self, context: list[int]) -> list[int]:
        self.tally.requests += 1
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.terms.request_timeout_s):
                return await ask(self.client, context)
        except TimeoutError as error:
            raise RequestError("late", f"no answer within {self.terms.request_timeout_s:g} s") from error
        finally:
            seconds = time.perf_counter() - start
            self.tally.request_seconds += seconds
            self.tally.latencies_s.append(seconds)

    def _note(self, failure: RequestError) -> None:
        self.failed_in_a_row += 1
        self.tally.failures[failure.kind] += 1
        if len(self.tally.reasons) < REASONS_KEPT:
            self.tally.reasons.append(f"{failure.kind}: {failure}")


async def ask(client: httpx.AsyncClient, context: Sequence[int]) -> list[int]:
    """Send one request and return its draft.

    Raises:
        RequestError: there is no answer, or it is not what the contract asks for.
    """
    try:
        response = await client.post("/draft", json={"tokens": list(context)})
    except httpx.ConnectError as error:
        raise RequestError("connection", f"cannot connect ({error})") from error
    except httpx.TransportError as error:
        kind = "reset" if _is_reset(error) else "connection"
        raise RequestError(kind, f"{type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise RequestError("status", f"HTTP {response.status_code}: {response.text[:200]}")
    return parse(response)


def parse(response: httpx.Response) -> list[int]:
    """Return the draft that a 200 answer holds.

    Raises:
        RequestError: the body is not `{"draft": [at most 16 token ids]}`.
    """
    try:
        body = response.json()
    except ValueError as error:
        raise RequestError("answer", f"not JSON: {response.text[:80]!r}") from error
    draft = body.get("draft") if isinstance(body, dict) else None
    if not isinstance(draft, list):
        raise RequestError("answer", f"no list under 'draft': {response.text[:80]!r}")
    if len(draft) > DRAFT_TOKENS:
        raise RequestError("answer", f"{len(draft)} ids in a draft; at most {DRAFT_TOKENS} are allowed")
    wrong = [token for token in draft if type(token) is not int or token < 0]
    if wrong:
        raise RequestError("answer", f"not a token id: {wrong[0]!r}")
    return draft


def _is_reset(error: httpx.TransportError) -> bool:
    """Tell whether the server dropped the connection: an idle one that it closed, or one in use."""
    if isinstance(error, httpx.RemoteProtocolError):
        return "disconnected" in str(error) or "closed" in str(error)
    return isinstance(error, httpx.ReadError | httpx.WriteError)
