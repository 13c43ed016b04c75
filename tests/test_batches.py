"""Batches: the schedule, what a row is cut to, and where the loss looks."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import as_rows

from stages.errors import UserError
from stages.training.batches import Schedule, Selection, collate, cut, prefetched
from stages.training.rows import Row

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=120)
lengths = st.tuples(st.integers(1, 9), st.integers(1, 7))


def row(prompt: int, continuation: int, first: int = 0, k: int = 2) -> Row:
    """A row whose tokens count up, so that each says where it stood."""
    numbers = torch.arange(first, first + prompt + continuation)
    after = numbers[prompt:]
    ranks = torch.arange(k)
    return Row(numbers[:prompt], after, after[:, None] + ranks, -after[:, None] - ranks / k)


@given(sizes, st.integers(50, 200), st.integers(0, 5))
def test_every_epoch_has_every_row_once_in_batches_that_fit(
        sizes: list[int], batch_tokens: int, seed: int) -> None:
    schedule, step = Schedule(torch.tensor(sizes), batch_tokens, seed), 0
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(sizes):
            batch = schedule.rows(step)
            assert 0 < sum(sizes[number] for number in batch) <= batch_tokens
            seen += batch
            step += 1
        assert sorted(seen) == list(range(len(sizes)))


@given(sizes, st.integers(50, 120), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_a_step_has_the_same_rows_wherever_a_run_resumes(
        sizes: list[int], batch_tokens: int, steps: list[int]) -> None:
    every = torch.tensor(sizes)
    through = Schedule(every, batch_tokens, 4)
    expected = [through.rows(step) for step in range(61)]
    jumping = Schedule(every, batch_tokens, 4)
    for step in steps:
        assert jumping.rows(step) == Schedule(every, batch_tokens, 4).rows(step) == expected[step]


def test_no_two_epochs_of_near_seeds_coincide() -> None:
    orders = {
        tuple(map(tuple, (Schedule(torch.ones(30), 5, seed).rows(epoch * 6 + i) for i in range(6))))
        for seed in range(6)
        for epoch in range(6)
    }
    assert len(orders) == 36


@given(sizes, st.integers(50, 200))
def test_a_batch_takes_rows_until_the_next_does_not_fit(sizes: list[int], batch_tokens: int) -> None:
    counts = cut(torch.tensor(sizes), batch_tokens)
    assert sum(counts) == len(sizes)
    at = 0
    for count in counts:
        taken = sum(sizes[at : at + count])
        at += count
        assert taken <= batch_tokens
        assert at == len(sizes) or taken + sizes[at] > batch_tokens


@given(st.lists(lengths, min_size=1, max_size=6), st.integers(0, 40), st.integers(16, 20))
def test_collate_points_at_what_predicts_each_token(
        shape: list[tuple[int, int]], free: int, longest: int) -> None:
    rows = [row(prompt, continuation, 1000 * index) for index, (prompt, continuation) in enumerate(shape)]
    used = sum(prompt + continuation - 1 for prompt, continuation in shape)
    batch = collate(rows, used + free, longest)
    bounds = batch.bounds_s.tolist()
    assert (bounds[0], bounds[-1], len(batch.tokens_t)) == (0, used + free, used + free)
    assert max(torch.diff(batch.bounds_s).tolist()) <= batch.longest == longest
    at = 0
    for index, one in enumerate(rows):
        text = [*one.prompt.tolist(), *one.continuation.tolist()]
        own = slice(bounds[index], bounds[index + 1])
        assert batch.tokens_t[own].tolist() == text[:-1]
        assert batch.positions_t[own].tolist() == list(range(len(text) - 1))
        for position, token in enumerate(one.continuation.tolist()):
            predictor = int(batch.predictors_n[at])
            assert predictor == bounds[index] + len(one.prompt) + position - 1
            assert batch.targets_n[at] == batch.topk_ids_nk[at, 0] == token
            assert batch.topk_logprobs_nk[at, 0] == -token
            at += 1
    assert at == len(batch.predictors_n)
    assert not batch.tokens_t[used:].any()  # the fill is nobody's


def test_a_row_is_cut_where_its_last_token_still_has_a_predictor() -> None:
    long = dataclasses.replace(row(1, 12), prompt=torch.ones(38, dtype=torch.long))
    kept = Selection(as_rows([long, row(41, 3), row(3, 2)]), 40)
    assert (len(kept), kept.dropped, kept.numbers.tolist()) == (2, 1, [0, 2])
    assert kept.sizes.tolist() == [40, 4]
    first = kept[0]
    assert len(first.prompt) + len(first.continuation) - 1 == 40
    assert len(first.continuation) == len(first.topk_ids) == len(first.topk_logprobs) == 3


def test_a_set_without_a_token_to_predict_is_refused() -> None:
    with pytest.raises(UserError, match="none of 2 rows has a continuation token within max_row_tokens = 40"):
        Selection(as_rows([row(41, 3), row(60, 2)]), 40)


def test_rows_of_several_shards_are_numbered_through() -> None:
    shards = [as_rows([row(2, 3), row(4, 1)]).shards[0], as_rows([row(1, 2, 500)]).shards[0]]
    rows = type(as_rows([row(1, 1)]))(shards)
    assert [len(rows[number].prompt) for number in range(len(rows))] == [2, 4, 1]
    assert rows[2].continuation.tolist() == [501, 502]


def test_what_fails_while_a_batch_is_made_reaches_the_trainer() -> None:
    def batches():
        yield collate([row(2, 2)])
        raise ValueError("the second is damaged")

    made = prefetched(batches(), pin=False)
    assert len(next(made).tokens_t) == 3
    with pytest.raises(ValueError, match="the second is damaged"):
        next(made)
