"""Drafting: whatever was cached and whoever is in the batch, a draft is what a fresh run alone gives."""

import random

import pytest
import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.engine import Engine
from drafter.model import Decoder

DECODER = small_decoder("llama", seed=32, tied=False)  # untied: less apt to repeat itself
CONTEXT, SLOTS, DRAFT, STEP = 24, 3, 4, 6  # STEP is what a context of 24 is cut in
NEAR_TIE = 1e-4


class Alone:
    """What a fresh run alone would draft: each id is the best one of a whole pass, without cache or batch."""

    def __init__(self, decoder: Decoder, token_limit: int | None = None) -> None:
        self.decoder = decoder
        self.token_limit = token_limit
        self.known: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        self.near_ties = 0

    def agrees(self, request: list[int], draft: list[int]) -> bool:
        """Say whether every id of a draft is greedy given those before it."""
        return draft == self.choices(request, draft)

    @torch.inference_mode()
    def choices(self, request: list[int], draft: list[int]) -> list[int]:
        """The best id after the request and after each id of the draft; a near-tie goes to the draft."""
        key = (tuple(request), tuple(draft))
        if key not in self.known:
            text = request + draft[:-1]
            hidden = self.decoder(torch.tensor([text]), torch.arange(len(text))[None])[0, len(request) - 1 :]
            best = self.decoder.logits(hidden)[:, : self.token_limit].topk(2)
            tied = (best.values[:, 0] - best.values[:, 1] < NEAR_TIE) & (
                best.indices[:, 1] == torch.tensor(draft)
            )
            self.near_ties += int(tied.sum())
            self.known[key] = torch.where(tied, torch.tensor(draft), best.indices[:, 0]).tolist()
        return self.known[key]


def check(alone: Alone, batch: list[list[int]], drafts: list[list[int]], count: int) -> None:
    assert [len(draft) for draft in drafts] == [count] * len(batch)
    assert drafts == [alone.choices(request, draft) for request, draft in zip(batch, drafts, strict=True)]


class Work:
    """Counts what a decoder is asked to do, and can make it fail."""

    def __init__(self, decoder: Decoder) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.fail_at = -1
        self.hook = decoder.register_forward_pre_hook(self._note)

    def _note(self, _module: Decoder, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(self.shapes) == self.fail_at:
            raise RuntimeError("planted fault")
        self.shapes.append(tuple(inputs[0].shape))

    def take(self) -> list[tuple[int, int]]:
        shapes, self.shapes = self.shapes, []
        return shapes


@pytest.fixture
def work():
    counter = Work(DECODER)
    yield counter
    counter.hook.remove()


def cut(request: list[int], context: int = CONTEXT, step: int = STEP) -> list[int]:
    """The last tokens that a request is drafted from: whole steps are cut off its front until it fits."""
    while len(request) > context:
        request = request[step:]
    return request


def conversations() -> list[list[int]]:
    """Texts that share nothing, a start, or nearly all; one of a single repeated token."""
    number = random.Random(5)
    trunk = [number.randrange(97) for _ in range(40)]
    branches = [trunk[:size] + [number.randrange(97) for _ in range(40 - size)] for size in (1, 10, 20, 30)]
    return [trunk, *branches, [number.randrange(97) for _ in range(40)], [7] * 40]


CONVERSATIONS = conversations()
ALONE = Alone(DECODER)
requests = st.builds(
    lambda which, size: CONVERSATIONS[which][:size],
    st.integers(0, len(CONVERSATIONS) - 1),
    st.integers(1, 40),
)


@settings(deadline=None, max_examples=120)
@given(batches=st.lists(st.lists(requests, min_size=1, max_size=SLOTS), min_size=1, max_size=6))
def test_any_interleaving_drafts_as_alone(batches: list[list[list[int]]]) -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    for batch in batches:
        check(ALONE, [cut(request) for request in batch], engine.draft(batch, DRAFT), DRAFT)


def test_the_texts_above_draft_apart_and_clearly() -> None:
    """Else the trial above could not tell one cached text from another, or passed by near-ties."""
    alone, fooled, trials = Alone(DECODER), 0, 0
    for text in CONVERSATIONS:
        for size in (9, 16, 22, CONTEXT):
            draft = Engine(DECODER, CONTEXT, slots=1).draft([text[:size]], DRAFT)[0]
            assert alone.agrees(text[:size], draft)
            for other in (text[1:size], [text[0] + 1, *text[1:size]], [*text[:3], 5, *text[4:size]]):
                fooled += alone.agrees(other, draft)
                trials += 1
    assert fooled < 0.2 * trials
    assert alone.near_ties == 0


def test_forty_conversations_grow_in_turns_on_few_slots() -> None:
    number = random.Random(9)
    texts = [[*CONVERSATIONS[0][:12], n, n + 1] for n in range(40)]
    engine = Engine(DECODER, 64, slots=32)
    for _ in range(6):
        number.shuffle(texts)
        for first in range(0, 40, 8):
            batch = texts[first : first + 8]
            drafts = engine.draft(batch, 3)
            check(ALONE, batch, drafts, 3)
            for index, draft in enumerate(drafts, first):
                texts[index] = texts[index] + draft[: number.randint(0, 3)]


def test_a_short_row_beside_a_long_one_and_changing_batch_sizes() -> None:
    engine = Engine(DECODER, 512, slots=32)
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
    engine = Engine(DECODER, context, slots=32)
    for _ in range(2):  # prefilled, then reused
        drafts = engine.draft([long, *neighbours], 16)
        check(ALONE, [cut(long, context, step), *neighbours], drafts, 16)


def test_the_cut_stays_in_place_while_a_long_conversation_grows(work: Work) -> None:
    engine = Engine(DECODER, CONTEXT, slots=2)
    prefilled = []
    for size in range(CONTEXT, 60):
        engine.draft([(CONVERSATIONS[0] * 2)[:size]], 1)
        prefilled.append(work.take()[0][1])
    assert len(prefilled) == 36
    assert sum(tokens > 1 for tokens in prefilled) == 1 + 36 // STEP  # the first, and one each step
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
    assert work.take() == [(1, 20), (1, 1), (1, 1), (1, 1)]
    assert engine.draft([request], 4) == first
    assert work.take() == [(1, 1)] * 4
    engine.draft([request[:11]], 1)  # a prefix of what is kept
    engine.draft([[*request, 1, 2]], 1)  # and what goes on from it
    assert work.take() == [(1, 1), (1, 2)]


def test_one_request_twice_in_a_batch() -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    request = CONVERSATIONS[1][:15]
    for _ in range(2):
        check(ALONE, [request] * SLOTS, engine.draft([request] * SLOTS, DRAFT), DRAFT)


@pytest.mark.parametrize("limit", [97, 60, 3])
def test_ids_from_the_token_limit_on_are_read_but_never_proposed(limit: int) -> None:
    engine, alone = Engine(DECODER, 64, slots=8, token_limit=limit), Alone(DECODER, limit)
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
    assert work.take()[0] == (3, 16)  # all of it anew
    for again in (grown, batch):
        check(ALONE, again, engine.draft(again, DRAFT), DRAFT)


def test_a_fault_inside_a_layer_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(DECODER, CONTEXT, slots=SLOTS)
    request = CONVERSATIONS[0][:16]
    engine.draft([request], DRAFT)

    def fail(*_: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(DECODER.model.layers[1].mlp, "forward", fail)
        with pytest.raises(MemoryError):
            engine.draft([[*request, 3]], DRAFT)
    for again in (request, [*request, 3], [*request, 3, 4]):
        check(ALONE, [again], engine.draft([again], DRAFT), DRAFT)


def test_more_requests_than_slots_is_the_callers_mistake() -> None:
    engine = Engine(DECODER, CONTEXT, slots=2)
    with pytest.raises(ValueError, match="slots"):
        engine.draft([[1], [2], [3]], 1)
    check(ALONE, [[1], [2]], engine.draft([[1], [2]], DRAFT), DRAFT)
