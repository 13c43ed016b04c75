"""Acceptance length (tau), defined once: how a continuation is replayed against drafts, and what is counted.

A verifier that holds the target's greedy continuation asks for a draft, accepts the longest prefix of it that
equals what comes next, adds one target token, and asks again with everything accepted, until the continuation
ends. tau = tokens of all continuations / verification steps of all conversations.

Two ways to the same number: `rounds` drives any drafter through that loop (in process, or over HTTP), and
`simulate` needs only where a teacher-forced greedy drafter agrees with the continuation.
"""

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

DRAFT_TOKENS = 16
RESAMPLES = 2000

Draft = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Conversation:
    """A prompt and the target's greedy continuation of it, both as token ids."""

    id: str
    category: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Steps:
    """The verification steps of one conversation.

    Attributes:
        accepted: for each step, how many drafted ids were accepted.
        offered: for each step, how many drafted ids had a token of the continuation to be compared with.
        tokens: the length of the continuation.
    """

    accepted: tuple[int, ...]
    offered: tuple[int, ...]
    tokens: int

    @property
    def count(self) -> int:
        """Verification steps taken."""
        return len(self.accepted)


@dataclass(frozen=True)
class Position:
    """Acceptance at one draft position (from 1): of the steps that reached it, the share that accepted it."""

    position: int
    reached: int
    accepted: int
    share: float


@dataclass(frozen=True)
class Tau:
    """Acceptance length over a set of conversations.

    Attributes:
        tau: tokens / steps over the whole set.
        low, high: 95% bootstrap interval of `tau`, conversations resampled.
        macro: mean of the conversations' own tau.
        categories: tau within each category.
        positions: acceptance by draft position, as far as any step reached.
        tokens, steps, conversations: what was counted; conversations without a token are left out.
    """

    tau: float
    low: float
    high: float
    macro: float
    categories: dict[str, float]
    positions: tuple[Position, ...]
    tokens: int
    steps: int
    conversations: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a record or a report."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """tau of one drafter less tau of another on the same conversations, with its 95% paired interval."""

    difference: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return plain values for a record or a report."""
        return asdict(self)


def read_conversations(path: Path) -> list[Conversation]:
    """Read evaluation conversations, one JSON object a line with `id`, `category`, `prompt`, `continuation`.

    Raises:
        ValueError: a line is not such an object, or repeats an id; the message names file and line.
    """
    found: dict[str, Conversation] = {}
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                conversation = _conversation(json.loads(line))
                if conversation.id in found:
                    raise ValueError(f"the id {conversation.id!r} was already used")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            found[conversation.id] = conversation
    return list(found.values())


def _conversation(row: object) -> Conversation:
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    for key in ("id", "category"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{key!r} must be a string")
    for key in ("prompt", "continuation"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"{key!r} must be a list of token ids")
    return Conversation(row["id"], row["category"], tuple(row["prompt"]), tuple(row["continuation"]))


def verify(draft: Sequence[int], rest: Sequence[int]) -> int:
    """Return how many leading ids of a draft equal the rest of the continuation."""
    length = 0
    for drafted, token in zip(draft, rest, strict=False):
        if drafted != token:
            break
        length += 1
    return length


def rounds(
    prompt: Sequence[int], continuation: Sequence[int], limit: int = DRAFT_TOKENS
) -> Generator[list[int], Sequence[int], Steps]:
    """Yield the context of each request, be sent its draft, and return the steps taken.

    Where a draft reaches the end of the continuation no target token is left to add: a step never counts
    tokens beyond the end.

    Raises:
        ValueError: a draft has more than `limit` ids.
    """
    accepted, offered, position = [], [], 0
    while position < len(continuation):
        draft = yield [*prompt, *continuation[:position]]
        if len(draft) > limit:
            raise ValueError(f"a draft has at most {limit} ids, this one has {len(draft)}")
        rest = continuation[position : position + limit + 1]
        length = verify(draft, rest)
        accepted.append(length)
        offered.append(min(len(draft), len(rest)))
        position += min(length + 1, len(rest))
    return Steps(tuple(accepted), tuple(offered), len(continuation))


def replay_offline(conversation: Conversation, draft: Draft, limit: int = DRAFT_TOKENS) -> Steps:
    """Replay one conversation against a draft function (context ids -> at most `limit` ids)."""
    return _drive(rounds(conversation.prompt, conversation.continuation, limit), draft)


def simulate(agreement: Any, limit: int = DRAFT_TOKENS) -> Steps:
    """Return the steps that a greedy drafter would take, from one teacher-forced pass.

    Args:
        agreement: for each token of the continuation, whether the drafter's argmax, given the target's own
            text before it, is that token: bools, or a one-dimensional numpy array or torch tensor of them.
        limit: ids in a draft.

    The steps are those of the loop: a draft is judged only up to its first wrong id, and up to there the
    drafter has seen the target's own text.
    """
    flags = agreement.tolist() if hasattr(agreement, "tolist") else [bool(flag) for flag in agreement]
    return _drive(
        rounds((), [True] * len(flags), limit), lambda context: flags[len(context) : len(context) + limit]
    )


def _drive(loop: Generator[list[int], Sequence[int], Steps], draft: Draft) -> Steps:
    try:
        context = next(loop)
        while True:
            context = loop.send(draft(context))
    except StopIteration as end:
        steps: Steps = end.value
        return steps


def summary(
    conversations: Sequence[Conversation], steps: Sequence[Steps], resamples: int = RESAMPLES, seed: int = 0
) -> Tau:
    """Sum up the steps of a set of conversations, given in the same order.

    Raises:
        ValueError: steps do not belong to these conversations, or there is no token to count.
    """
    if [len(c.continuation) for c in conversations] != [s.tokens for s in steps]:
        raise ValueError("the steps are not those of these conversations")
    kept = [(c, s) for c, s in zip(conversations, steps, strict=True) if s.tokens]
    counts_n2 = _counts(steps)
    low, high = interval(lambda rows: tau_of(counts_n2[rows]), len(counts_n2), resamples, seed)
    categories = sorted({c.category for c, _ in kept})
    return Tau(
        tau=tau_of(counts_n2),
        low=low,
        high=high,
        macro=float(np.mean(counts_n2[:, 0] / counts_n2[:, 1])),
        categories={name: tau_of(_counts(s for c, s in kept if c.category == name)) for name in categories},
        positions=_positions([s for _, s in kept]),
        tokens=int(counts_n2[:, 0].sum()),
        steps=int(counts_n2[:, 1].sum()),
        conversations=len(kept),
    )


def paired(
    first: Sequence[Steps], second: Sequence[Steps], resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Compare two drafters on the same conversations, in the same order: tau of the first less the second's.

    Raises:
        ValueError: the two are not of the same conversations, or there is no token to count.
    """
    if [s.tokens for s in first] != [s.tokens for s in second]:
        raise ValueError("the two drafters were not replayed on the same conversations")
    a_n2, b_n2 = _counts(first), _counts(second)

    def difference(rows: Any) -> float:
        return tau_of(a_n2[rows]) - tau_of(b_n2[rows])

    low, high = interval(difference, len(a_n2), resamples, seed)
    return Difference(difference(slice(None)), low, high)


def _counts(steps: Iterable[Steps]) -> Any:
    """Return [n, 2]: tokens and steps of each conversation that has any."""
    counts_n2 = np.array([(s.tokens, s.count) for s in steps if s.tokens], dtype=np.int64).reshape(-1, 2)
    if not len(counts_n2):
        raise ValueError("there is no continuation token to count")
    return counts_n2


def tau_of(counts_n2: Any) -> float:
    """Return tau of some conversations: tokens over steps, from [n, 2]: tokens and steps of each."""
    tokens, steps = counts_n2.sum(axis=0)
    return float(tokens / steps)


def interval(
    statistic: Callable[[Any], float], size: int, resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 2.5% and 97.5% points of a statistic over bootstrap samples of rows."""
    generator = np.random.default_rng(seed)
    values = [statistic(generator.integers(size, size=size)) for _ in range(resamples)]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _positions(steps: Sequence[Steps]) -> tuple[Position, ...]:
    pairs = [pair for s in steps for pair in zip(s.accepted, s.offered, strict=True)]
    found: list[Position] = []
    while reached := sum(accepted >= len(found) < offered for accepted, offered in pairs):
        passed = sum(accepted > len(found) for accepted, _ in pairs)
        found.append(Position(len(found) + 1, reached, passed, passed / reached))
    return tuple(found)
