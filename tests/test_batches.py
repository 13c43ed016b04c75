"""Batches: the schedule, what a row is cut to, and where the loss looks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import UserError
from stages.training.batches import Schedule, collate, trainable
from stages.training.shards import Row

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=120)
lengths = st.tuples(st.integers(1, 9), st.integers(1, 7))


def row(prompt: int, continuation: int, first: int = 0, k: int = 2) -> Row:
    """A row whose tokens count up, so that each says where it stood."""
    numbers = torch.arange(first, first + prompt + continuation)
    after = numbers[prompt:]
    ranks = torch.arange(k)
    return Row(numbers[:prompt], after, after[:, None] + ranks, -after[:, None] - ranks / k)


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_has_every_row_once(sizes: list[int], batch_rows: int, seed: int) -> None:
    schedule = Schedule(sizes, batch_rows, seed)
    per_epoch = -(-len(sizes) // batch_rows)
    for epoch in range(3):
        batches = [schedule.rows(epoch * per_epoch + step) for step in range(per_epoch)]
        assert sorted(number for batch in batches for number in batch) == list(range(len(sizes)))
        assert all(1 <= len(batch) <= batch_rows for batch in batches)


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_a_step_has_the_same_rows_wherever_a_run_resumes(
    sizes: list[int], batch_rows: int, steps: list[int]
) -> None:
    through = Schedule(sizes, batch_rows, 4)
    expected = [through.rows(step) for step in range(61)]
    jumping = Schedule(sizes, batch_rows, 4)
    for step in steps:
        assert jumping.rows(step) == Schedule(sizes, batch_rows, 4).rows(step) == expected[step]


def test_epochs_and_seeds_differ() -> None:
    schedule = Schedule([5] * 40, 4, 1)
    first, second = ([schedule.rows(step) for step in range(at, at + 10)] for at in (0, 10))
    other = Schedule([5] * 40, 4, 2)
    assert first != second
    assert first != [other.rows(step) for step in range(10)]


def test_no_two_epochs_of_near_seeds_coincide() -> None:
    orders = {
        tuple(map(tuple, (Schedule([1] * 30, 5, seed).rows(epoch * 6 + i) for i in range(6))))
        for seed in range(6)
        for epoch in range(6)
    }
    assert len(orders) == 36


def test_batches_hold_rows_of_like_length_and_come_in_no_order_of_length() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(10, 500, (640,), generator=generator).tolist()
    schedule = Schedule(sizes, 8, 3)
    batches = [[sizes[number] for number in schedule.rows(step)] for step in range(80)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    assert padded < 1.1 * sum(sizes)  # in a plain shuffle it is about 1.75
    means = torch.tensor([sum(batch) / len(batch) for batch in batches])
    assert abs(torch.corrcoef(torch.stack((means, torch.arange(80.0))))[0, 1]) < 0.3


@settings(deadline=None)
@given(st.lists(lengths, min_size=1, max_size=6))
def test_collate_points_at_what_predicts_each_token(shape: list[tuple[int, int]]) -> None:
    rows = [row(prompt, continuation, 1000 * index) for index, (prompt, continuation) in enumerate(shape)]
    batch = collate(rows)
    width = max(prompt + continuation - 1 for prompt, continuation in shape)
    assert batch.tokens_bt.shape == (len(rows), width)
    at = 0
    for index, one in enumerate(rows):
        text = [*one.prompt.tolist(), *one.continuation.tolist()]
        assert batch.tokens_bt[index, : len(text) - 1].tolist() == text[:-1]
        assert not batch.tokens_bt[index, len(text) - 1 :].any()
        for position, token in enumerate(one.continuation.tolist()):
            predictor = int(batch.predictors_n[at])
            assert divmod(predictor, width) == (index, len(one.prompt) + position - 1)
            assert int(batch.tokens_bt.flatten()[predictor]) == token - 1  # the tokens count up
            assert int(batch.targets_n[at]) == token
            assert torch.equal(batch.topk_ids_nk[at], one.topk_ids[position])
            assert torch.equal(batch.topk_logprobs_nk[at], one.topk_logprobs[position])
            at += 1
    assert at == len(batch.predictors_n) == len(batch.targets_n) == len(batch.topk_ids_nk)


def test_to_moves_every_field() -> None:
    moved = collate([row(2, 3)]).to("meta")
    assert {getattr(moved, name).device.type for name in moved.__dataclass_fields__} == {"meta"}


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 12))
def test_rows_are_cut_to_the_limit_and_those_without_a_target_counted(
    shape: list[tuple[int, int]], limit: int
) -> None:
    rows = [row(prompt, continuation) for prompt, continuation in shape]
    lasting = [one for one in rows if len(one.prompt) <= limit and len(one.continuation) > 0]
    if not lasting:
        with pytest.raises(UserError, match=f"none of {len(rows)} rows .* max_row_tokens = {limit}"):
            trainable(rows, limit)
        return
    kept, dropped = trainable(rows, limit)
    assert dropped == len(rows) - len(lasting)
    for found, one in zip(kept, lasting, strict=True):
        assert torch.equal(found.prompt, one.prompt)
        size = min(len(one.continuation), limit + 1 - len(one.prompt))
        assert size > 0
        assert torch.equal(found.continuation, one.continuation[:size])
        assert torch.equal(found.topk_ids, one.topk_ids[:size])
        assert torch.equal(found.topk_logprobs, one.topk_logprobs[:size])
    assert collate(kept).tokens_bt.shape[1] <= limit


def test_three_prompts_of_four_over_the_limit_and_then_all() -> None:
    long = [row(40, 5) for _ in range(3)]
    kept, dropped = trainable([*long, row(8, 5)], 32)
    assert (len(kept), dropped) == (1, 3)
    with pytest.raises(UserError, match=r"none of 3 rows .* raise it"):
        trainable(long, 32)
    with pytest.raises(UserError, match="none of 0 rows"):
        trainable([], 32)
