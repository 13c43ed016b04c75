"""Parity: whatever was asked before and whoever asks beside it, a draft is transformers' greedy run.

Conversations grow by what is accepted, fork, fall back to an earlier state, outgrow the context and ask twice
at once, over fewer slots than there are conversations. All in float32; only an id whose logit lies less than
`alone.NEAR_TIE` under the best one passes for it.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
import torch
from alone import FAMILIES, VOCAB, Alone, cut, small_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from serving import Server, figures, running, write_model

from drafter.config import ModelConfig
from drafter.engine import Engine
from drafter.model import build, suited

CONTEXT, STEP, DRAFT, LIMIT = 32, 8, 16, 90  # a context of 32 is cut in steps of 8
SLOTS, BATCH, TALKS = 5, 4, 7
SERVING = {"context_tokens": CONTEXT, "draft_tokens": DRAFT, "token_limit": LIMIT, "max_batch": BATCH,
           "slots": SLOTS}  # fmt: skip
FEW = 4  # ids of a draft, where the engine is tried by itself
DraftAll = Callable[[list[list[int]]], list[list[int]]]

MODELS = {family: small_model(family, seed=3) for family in FAMILIES}
CONFIGS = {family: ModelConfig.from_transformers(model.config.to_dict()) for family, model in MODELS.items()}
TENSORS = {family: suited(CONFIGS[family], dict(model.state_dict())) for family, model in MODELS.items()}
ALONE = {family: Alone(model, LIMIT) for family, model in MODELS.items()}


def trunks() -> list[list[int]]:
    """Texts to begin with: some share nothing, some a start, one repeats a single token."""
    number = random.Random(5)
    first, second = ([number.randrange(VOCAB) for _ in range(80)] for _ in range(2))
    branches = [first[:size] + second[size:][::-1] for size in (1, 15, 16, 17, 40)]
    return [first, second, *branches, [7] * 80]


TRUNKS = trunks()
ids, which, sizes = st.integers(0, VOCAB - 1), st.integers(0, TALKS - 1), st.integers(1, 80)
growth = st.tuples(which, st.just(DRAFT) | st.integers(0, DRAFT), ids)  # who, accepted ids, and what follows
neighbours = st.lists(growth, max_size=BATCH - 1)


@dataclass
class Talk:
    """A conversation so far, and the last draft for it."""

    text: list[int]
    draft: list[int] = field(default_factory=list)


class Interleaving(RuleBasedStateMachine):
    """Conversations over one set of slots; each rule changes some and asks for drafts for them at once.

    Args:
        family: whose model drafts.
        opened: gives what drafts for a batch; told whether batches are to be filled up, as a GPU has them.
        count: ids of a draft.
        happened: counts what the trial has seen.
    """

    def __init__(self, family: str, opened: Callable[[bool], DraftAll], count: int, happened: Counter[str]
                 ) -> None:
        super().__init__()
        self.alone, self.opened, self.count, self.happened = ALONE[family], opened, count, happened
        self.talks = [Talk(trunk[:20]) for trunk in TRUNKS[:2]]

    @initialize(static=st.booleans())
    def start(self, static: bool) -> None:
        self.drafted = self.opened(static)

    def talk(self, number: int) -> Talk:
        return self.talks[number % len(self.talks)]

    def grow(self, number: int, accepted: int, token: int) -> Talk:
        """Add what is accepted and one more; a conversation without a draft is to ask again as it is."""
        talk = self.talk(number)
        if talk.draft:
            talk.text, talk.draft = [*talk.text, *talk.draft[:accepted], token], []
            self.happened["grown by a whole draft and one"] += accepted >= self.count
        return talk

    def ask(self, first: Talk, beside: list[tuple[int, int, int]]) -> None:
        """Hold each draft of a batch to the greedy run of its request alone."""
        batch = [first, *(self.grow(*one) for one in beside)]
        requests = [list(talk.text) for talk in batch]
        drafts = self.drafted(requests)
        for talk, request, draft in zip(batch, requests, drafts, strict=True):
            assert len(draft) == self.count
            assert draft == self.alone.choices(cut(request, CONTEXT, STEP), draft)
            talk.draft = draft
        self.happened["drafts"] += len(batch)
        self.happened["asked twice at once"] += len({id(talk) for talk in batch}) < len(batch)
        self.happened["longer than the context"] += max(map(len, requests)) > CONTEXT

    @rule(trunk=st.sampled_from(TRUNKS), size=sizes, beside=neighbours)
    def begin(self, trunk: list[int], size: int, beside: list[tuple[int, int, int]]) -> None:
        self.talks = [*self.talks, Talk(trunk[:size])][-TALKS:]
        self.ask(self.talks[-1], beside)

    @rule(one=growth, beside=neighbours)
    def go_on(self, one: tuple[int, int, int], beside: list[tuple[int, int, int]]) -> None:
        self.ask(self.grow(*one), beside)

    @rule(number=which, beside=neighbours)
    def ask_again(self, number: int, beside: list[tuple[int, int, int]]) -> None:
        self.ask(self.talk(number), beside)

    @rule(number=which, size=sizes, more=st.lists(ids, max_size=3), beside=neighbours)
    def fork(self, number: int, size: int, more: list[int], beside: list[tuple[int, int, int]]) -> None:
        self.talks = [*self.talks, Talk(self.talk(number).text[:size] + more)][-TALKS:]
        self.ask(self.talks[-1], beside)

    @rule(number=which, fewer=st.integers(1, 20), beside=neighbours)
    def fall_back(self, number: int, fewer: int, beside: list[tuple[int, int, int]]) -> None:
        talk = self.talk(number)
        talk.text = talk.text[:-fewer] or talk.text[:1]
        self.ask(talk, beside)


def trial(family: str, opened: Callable[[bool], DraftAll], count: int, examples: int) -> None:
    """Run interleavings of 20 batches each, and see that they had it all in them."""
    happened: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: Interleaving(family, opened, count, happened),
        settings=settings(max_examples=examples, stateful_step_count=20,
                          suppress_health_check=list(HealthCheck)),
    )
    assert happened["drafts"] > 20 * examples, happened
    for what in ("grown by a whole draft and one", "asked twice at once", "longer than the context"):
        assert happened[what] > examples // 3, happened
    assert ALONE[family].near_ties < 10


@pytest.mark.parametrize("family", FAMILIES)
def test_the_judge_is_transformers_greedy_run(family: str) -> None:
    """And one that sees a difference: another token anywhere in a request gives another draft."""
    alone, fooled, trials = Alone(MODELS[family], LIMIT), 0, 0
    for trunk, size in itertools.product(TRUNKS[:3], (1, 20, 40)):
        draft = alone.greedy(trunk[:size], DRAFT)
        assert alone.agrees(trunk[:size], draft)
        for place in range(0, size, 7):
            other = [*trunk[:place], (trunk[place] + 1) % VOCAB, *trunk[place + 1 : size]]
            fooled += alone.agrees(other, draft)
            trials += 1
    assert trials == 30
    assert fooled < 0.1 * trials
    assert alone.near_ties == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_any_interleaving_drafts_as_alone(family: str) -> None:
    decoder = build(CONFIGS[family], TENSORS[family], torch.float32, "cpu")

    def opened(static: bool) -> DraftAll:
        engine = Engine(decoder, CONTEXT, SLOTS, LIMIT, FEW)
        assert engine.drafting is not None
        engine.drafting.static = static
        return lambda requests: engine.draft(requests, FEW)

    trial(family, opened, FEW, examples=40)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[tuple[str, Server]]:
    family = request.param
    folder = tmp_path_factory.mktemp(family) / "model"
    with running(write_model(folder, SERVING, CONFIGS[family], TENSORS[family])) as server:
        yield family, server


def test_any_interleaving_over_http_drafts_as_alone(served: tuple[str, Server]) -> None:
    """One process serves every interleaving: what it has cached is all that came before."""
    family, server = served
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(BATCH) as pool,
    ):

        def asked(request: list[int]) -> list[int]:
            answer = client.post("/draft", json={"tokens": request})
            assert answer.status_code == 200, answer.text
            draft: list[int] = answer.json()["draft"]
            return draft

        trial(family, lambda _: lambda requests: list(pool.map(asked, requests)), DRAFT, examples=30)
    seen = figures(server.url)
    assert seen["drafter_batch_rows_sum"] > 1.2 * seen["drafter_batch_rows_count"]
    assert seen["drafter_prefix_hits_total"] > 50
    assert seen["drafter_reused_tokens_total"] > 1000
