"""Drafting: what it costs, what a fault leaves behind, and trials that parity's interleavings seldom meet."""

import random
from collections.abc import Callable

import pytest
import torch
from alone import Alone, cut, reference
from conftest import small_decoder
from torch.nn import functional

from drafter import drafting, plain
from drafter.engine import Engine
from drafter.inference import Inference

DECODER = small_decoder("llama", seed=32, tied=False)  # untied: less apt to repeat itself
MODEL = reference(DECODER, "llama")
CONTEXT, SLOTS, DRAFT, STEP = 24, 3, 4, 6  # STEP is what a context of 24 is cut in


def check(alone: Alone, batch: list[list[int]], drafts: list[list[int]], count: int) -> None:
    assert [len(draft) for draft in drafts] == [count] * len(batch)
    assert drafts == [alone.choices(request, draft) for request, draft in zip(batch, drafts, strict=True)]


class Work:
    """Counts the tokens of each pass, and can make one fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        self.fail_at = -1
        plain = Inference.hidden

        def hidden(inference: Inference, tokens_n: torch.Tensor, attend: object) -> torch.Tensor:
            if len(self.passes) == self.fail_at:
                raise RuntimeError("planted fault")
            self.passes.append(len(tokens_n))
            return plain(inference, tokens_n, attend)

        monkeypatch.setattr(Inference, "hidden", hidden)

    def take(self) -> list[int]:
        passes, self.passes = self.passes, []
        return passes


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def engine_of(static: bool, **settings: int) -> Engine:
    """An engine whose batches are filled up to few sizes, as on a GPU, or not."""
    engine = Engine(DECODER, **settings)
    assert engine.drafting is not None
    engine.drafting.static = static
    return engine


def conversations() -> list[list[int]]:
    """Texts that share nothing, a start, or nearly all; one of a single repeated token."""
    number = random.Random(5)
    trunk = [number.randrange(97) for _ in range(40)]
    branches = [trunk[:size] + [number.randrange(97) for _ in range(40 - size)] for size in (1, 10, 20, 30)]
    return [trunk, *branches, [number.randrange(97) for _ in range(40)], [7] * 40]


CONVERSATIONS = conversations()
ALONE = Alone(MODEL)


def test_the_texts_above_draft_apart_and_clearly() -> None:
    """Else the trials below could not tell one cached text from another, or passed by near-ties."""
    alone, fooled, trials = Alone(MODEL), 0, 0
    for text in CONVERSATIONS:
        for size in (9, 16, 22, CONTEXT):
            draft = Engine(DECODER, CONTEXT, slots=1).draft([text[:size]], DRAFT)[0]
            assert alone.agrees(text[:size], draft)
            for other in (text[1:size], [text[0] + 1, *text[1:size]], [*text[:3], 5, *text[4:size]]):
                fooled += alone.agrees(other, draft)
                trials += 1
    assert fooled < 0.2 * trials
    assert alone.near_ties == 0


@pytest.mark.parametrize("static", [False, True])
def test_a_step_of_a_replay_runs_one_or_two_new_tokens_a_row(work: Work, static: bool) -> None:
    engine = engine_of(static, context_tokens=100, slots=8)
    texts = [text[:20] for text in CONVERSATIONS[:3]]
    drafts = engine.draft(texts, DRAFT)
    rows = 4 if static else 3  # filled up to a power of two
    assert work.take() == [3 * 19, 2 * rows if static else rows, *[rows] * (DRAFT - 1)]
    texts = [[*text, *draft[:size], 9] for text, draft, size in zip(texts, drafts, (0, 2, 3), strict=True)]
    drafts = engine.draft(texts, DRAFT)
    assert work.take() == [2 * rows if static else rows, *[rows] * (DRAFT - 1)]
    texts = [[*text, *draft[:size], 9] for text, draft, size in zip(texts, drafts, (0, 2, 4), strict=True)]
    check(ALONE, texts, engine.draft(texts, DRAFT), DRAFT)
    assert work.take() == [2 * rows, *[rows] * (DRAFT - 1)]  # the last token of a whole draft has not run yet


def test_a_large_batch_runs_two_tokens_a_row_only_where_one_has_two(work: Work) -> None:
    """A pass of up to 16 tokens costs the same however many they are; beyond that each row's second does."""
    engine = engine_of(True, context_tokens=100, slots=16)
    texts = [[row, *CONVERSATIONS[row % 7][:8]] for row in range(12)]
    drafts = engine.draft(texts, DRAFT)
    assert work.take() == [12 * 8, 16, *[16] * (DRAFT - 1)]
    for accepted, first in ((1, 16), (DRAFT, 32)):
        texts = [[*text, *draft[:1], 9] for text, draft in zip(texts, drafts, strict=True)]
        texts[3] = [*texts[3][:-2], *drafts[3][:accepted], 9]
        drafts = engine.draft(texts, DRAFT)
        check(ALONE, texts, drafts, DRAFT)
        assert work.take() == [first, *[16] * (DRAFT - 1)]


def test_rows_that_fill_up_a_batch_write_nothing() -> None:
    engine = engine_of(True, context_tokens=CONTEXT, slots=8)
    assert engine.slots is not None
    engine.draft([text[:12] for text in CONVERSATIONS[:3]], DRAFT)
    for part in engine.slots.cached:
        written = part.abs().sum((0, 2, 4)) > 0
        assert written.sum(1).tolist() == [12 + DRAFT - 1] * 3 + [0] * 5


def test_a_warm_up_leaves_nothing_behind() -> None:
    engine = engine_of(False, context_tokens=CONTEXT, slots=4)
    engine.warm_up(3, DRAFT)
    assert engine.slots is not None
    assert engine.slots.tokens == [[]] * 4
    assert engine.mode == "plain"


@pytest.mark.parametrize("wrong", [(4, 2), (16, 1), (16, 2)])
def test_graphs_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, int]) -> None:
    """A graph that replays something else is told by the warm-up, and drafts are made step by step."""
    engine = engine_of(True, context_tokens=CONTEXT, slots=16)
    assert engine.drafting is not None
    engine.static, graphs, ran = True, engine.drafting.graphs, set()
    plain = graphs.run

    def run(key: tuple[int, int, int], step: Callable[[], None]) -> None:
        plain(key, step)
        if key in ran and graphs.enabled and key[:2] == wrong:
            engine.drafting.drafts_bc[0, 1] += 1
        ran.add(key)

    graphs.enabled = True
    monkeypatch.setattr(graphs, "_capture", lambda *_: None)
    monkeypatch.setattr(graphs, "run", run)
    assert engine.mode == "graphs"
    engine.warm_up(16, DRAFT)
    assert engine.mode == "plain"
    batch = [text[:9] for text in CONVERSATIONS[:4]]
    check(ALONE, batch, engine.draft(batch, DRAFT), DRAFT)


def test_a_warm_up_runs_every_shape_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(True, context_tokens=CONTEXT, slots=16)
    assert engine.drafting is not None
    engine.static, keys = True, set()
    monkeypatch.setattr(engine.drafting.graphs, "run", lambda key, step: (keys.add(key), step()))
    engine.warm_up(16, DRAFT)
    shapes = ((1, 2), (2, 2), (4, 2), (8, 2), (16, 1), (16, 2))
    assert keys == {(*shape, DRAFT) for shape in shapes}


@pytest.mark.parametrize("static", [False, True])
def test_forty_conversations_grow_in_turns_on_few_slots(static: bool) -> None:
    number = random.Random(9)
    texts = [[*CONVERSATIONS[0][:12], n, n + 1] for n in range(40)]
    engine = engine_of(static, context_tokens=64, slots=32)
    for _ in range(6):
        number.shuffle(texts)
        for first in range(0, 40, 8):
            batch = texts[first : first + 8]
            drafts = engine.draft(batch, 3)
            check(ALONE, batch, drafts, 3)
            for index, draft in enumerate(drafts, first):
                texts[index] = texts[index] + draft[: number.randint(0, 3)]


@pytest.mark.parametrize("static", [False, True])
def test_a_short_row_beside_a_long_one_and_changing_batch_sizes(static: bool) -> None:
    engine = engine_of(static, context_tokens=512, slots=32)
    number = random.Random(3)
    long = [[number.randrange(97) for _ in range(number.randint(250, 300))] for _ in range(32)]
    short = [[number.randrange(97) for _ in range(3)] for _ in range(5)]
    for batch in ([short[0], long[0]], long, short[:1], short, long[::-1]):
        check(ALONE, batch, engine.draft(batch, 2), 2)


@pytest.mark.parametrize("over", [-17, -16, -15, -1, 0, 1, 2, 17, 400])
def test_at_the_length_limit_all_are_served_and_neighbours_undisturbed(over: int) -> None:
    context, step = 64, 16  # a whole number of column steps: the draft of a full row needs columns of its own
    number = random.Random(77)
    long = [number.randrange(97) for _ in range(context + 400)][: context + over]
    neighbours = [[number.randrange(97) for _ in range(number.randint(1, 20))] for _ in range(31)]
    engine = engine_of(over % 2 == 0, context_tokens=context, slots=32)
    for _ in range(2):  # prefilled, then reused
        drafts = engine.draft([long, *neighbours], 16)
        check(ALONE, [cut(long, context, step), *neighbours], drafts, 16)


def test_the_cut_stays_in_place_while_a_long_conversation_grows(work: Work) -> None:
    engine = Engine(DECODER, CONTEXT, slots=2)
    prefilled = []
    for size in range(CONTEXT, 60):
        engine.draft([(CONVERSATIONS[0] * 2)[:size]], 1)
        prefilled.append(sum(work.take()))
    assert len(prefilled) == 36
    assert sum(tokens > 2 for tokens in prefilled) == 1 + 36 // STEP  # the first, and one each step
    assert all(tokens <= CONTEXT for tokens in prefilled)


def test_a_real_context_is_cut_in_steps_of_256() -> None:
    engine = Engine(DECODER, 1792, slots=1)
    request = list(range(5000))
    kept = {size: engine._fitted(request[:size]) for size in (1791, 1792, 1793, 2048, 2049, 5000)}
    assert [tokens[0] for tokens in kept.values()] == [0, 0, 256, 256, 512, 3328]
    assert all(tokens[-1] == size - 1 for size, tokens in kept.items())


def test_a_repeat_costs_one_token(work: Work) -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    request = CONVERSATIONS[0][:20]
    first = engine.draft([request], 4)
    assert work.take() == [19, 1, 1, 1, 1]
    assert engine.draft([request], 4) == first
    assert work.take() == [1] * 4
    engine.draft([request[:11]], 1)  # a prefix of what is kept
    engine.draft([[*request, 1, 2]], 1)  # and what goes on from it
    assert work.take() == [1, 2]


def test_one_request_twice_in_a_batch() -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    request = CONVERSATIONS[1][:15]
    for _ in range(2):
        check(ALONE, [request] * SLOTS, engine.draft([request] * SLOTS, DRAFT), DRAFT)


@pytest.mark.parametrize("limit", [97, 60, 3])
def test_ids_from_the_token_limit_on_are_read_but_never_proposed(limit: int) -> None:
    engine, alone = Engine(DECODER, 64, slots=8, token_limit=limit), Alone(MODEL, limit)
    batch = [[96, 95, first] for first in range(90, 97)]
    drafts = engine.draft(batch, 8)
    check(alone, batch, drafts, 8)
    assert max(map(max, drafts)) < limit
    free = Engine(DECODER, 64, slots=8).draft(batch, 8)
    assert max(map(max, free)) >= 60  # else nothing was held back


@pytest.mark.parametrize("fail_at", range(DRAFT))
def test_after_a_fault_nothing_stored_is_trusted(work: Work, fail_at: int) -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    batch = [text[:16] for text in (CONVERSATIONS[0], CONVERSATIONS[5], CONVERSATIONS[6])]
    engine.draft(batch, DRAFT)
    work.take()
    work.fail_at = fail_at
    grown = [[*request, 1, 2] for request in batch]
    with pytest.raises(RuntimeError, match="planted"):
        engine.draft(grown, DRAFT)
    work.fail_at = -1
    assert engine.slots is not None
    assert engine.slots.tokens == [[]] * SLOTS
    work.take()
    check(ALONE, batch, engine.draft(batch, DRAFT), DRAFT)
    assert work.take()[0] == 3 * 15  # all of it anew
    for again in (grown, batch):
        check(ALONE, again, engine.draft(again, DRAFT), DRAFT)


def test_a_fault_inside_a_layer_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    request = CONVERSATIONS[0][:16]
    engine.draft([request], DRAFT)

    calls: list[object] = []

    def fail(*matrices: torch.Tensor) -> torch.Tensor:
        calls.append(matrices)
        if len(calls) == 6:  # in the second layer
            raise MemoryError("planted")
        return functional.linear(*matrices)

    with monkeypatch.context() as patch:
        patch.setattr(plain, "product", fail)
        with pytest.raises(MemoryError):
            engine.draft([[*request, 3]], DRAFT)
    for again in (request, [*request, 3], [*request, 3, 4]):
        check(ALONE, [again], engine.draft([again], DRAFT), DRAFT)


def test_more_requests_than_slots_is_the_callers_mistake() -> None:
    engine = Engine(DECODER, CONTEXT, slots=2)
    with pytest.raises(ValueError, match="slots"):
        engine.draft([[1], [2], [3]], 1)
    check(ALONE, [[1], [2]], engine.draft([[1], [2]], DRAFT), DRAFT)
    for count in (17, 0, -1):
        with pytest.raises(ValueError, match=f"{count} ids to draft, but this engine was made for 1 to 16"):
            engine.draft([[1]], count)


def test_no_prefill_is_larger_than_it_may_be(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "PREFILL_TOKENS", 30)
    engine = Engine(DECODER, 100, slots=8)
    batch = [text[:size] for text, size in zip(CONVERSATIONS, (16, 15, 3, 2, 40, 20), strict=False)]
    check(ALONE, batch, engine.draft(batch, DRAFT), DRAFT)
    # All but each row's last token: 15 and 14, then 2 alone, since 40 are too many; 40 and 20 beside nothing.
    assert work.take()[:4] == [15 + 14, 2, 39, 19]
