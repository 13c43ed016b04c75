"""The loss against its formula in float64, and what padding may never do to it."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.model import Decoder
from stages.training.batches import collate
from stages.training.loss import TINY, learning_rate, loss
from stages.training.shards import Row

VOCAB = 97


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()


def formula(logits: np.ndarray, target: int, ids: np.ndarray, logprobs: np.ndarray) -> tuple[float, float]:
    """CE and KL of one position: k outcomes and the rest as one, which is never less than TINY."""
    own, wanted = softmax(logits.astype(np.float64)), np.exp(logprobs.astype(np.float64))
    p = [*wanted, max(1 - wanted.sum(), TINY)]
    q = [*own[ids], max(1 - own[ids].sum(), TINY)]
    return -math.log(own[target]), sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


def case(seed: int, positions: int, k: int, sharpness: float) -> tuple[torch.Tensor, ...]:
    """Random logits, and the top-k of another random distribution, stored as half as the teacher does."""
    generator = torch.Generator().manual_seed(seed)
    logits_nv, target_nv = (
        torch.randn(positions, VOCAB, generator=generator) * sharpness for _ in range(2)
    )
    top = target_nv.log_softmax(-1).topk(k)
    return logits_nv, top.indices[:, 0], top.indices, top.values.half().float()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(1, 7), st.integers(1, 20), st.sampled_from([0.1, 1.0, 4.0]),
       st.sampled_from([0.0, 0.3, 1.0]))  # fmt: skip
def test_is_the_formula(seed: int, positions: int, k: int, sharpness: float, share: float) -> None:
    logits_nv, targets_n, ids_nk, logprobs_nk = case(seed, positions, k, sharpness)
    found = loss(logits_nv, targets_n, ids_nk, logprobs_nk, share)
    each = [
        formula(*(part[i].numpy() for part in (logits_nv, targets_n, ids_nk, logprobs_nk)))
        for i in range(positions)
    ]
    ce, kl = np.mean(each, axis=0)
    assert float(found.ce) == pytest.approx(ce, abs=1e-5)
    # The rest is a difference of float32 numbers near 1: its logarithm is good to a few digits only.
    assert float(found.kl) == pytest.approx(kl, abs=2e-4)
    total = share * float(found.ce) + (1 - share) * float(found.kl)
    assert float(found.total) == pytest.approx(total, abs=1e-5)
    assert found.positions == positions


def test_kl_is_zero_for_the_same_distribution_and_only_there() -> None:
    logits_nv, targets_n, *_ = case(1, 5, 8, 1.0)
    top = logits_nv.log_softmax(-1).topk(8)
    same = loss(logits_nv, targets_n, top.indices, top.values, 0.5)
    assert float(same.kl) == pytest.approx(0, abs=1e-6)
    moved = loss(logits_nv * 0.5, targets_n, top.indices, top.values, 0.5)
    assert float(moved.kl) > 0.05


def test_the_rest_counts_as_one_outcome() -> None:
    """Probability moved among tokens outside the top-k changes nothing; moved into it, it does."""
    logits_nv, targets_n, ids_nk, logprobs_nk = case(2, 1, 4, 1.0)
    outside = [token for token in range(VOCAB) if token not in ids_nk[0].tolist()]
    swapped, sunk = logits_nv.clone(), logits_nv.clone()
    swapped[0, outside] = logits_nv[0, outside[::-1]]
    sunk[0, outside] -= 3
    before, among, into = (
        float(loss(each, targets_n, ids_nk, logprobs_nk, 0.0).total) for each in (logits_nv, swapped, sunk)
    )
    assert among == pytest.approx(before, abs=1e-5)
    assert abs(into - before) > 0.1


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_finite(sharpness: float, share: float, dtype: torch.dtype) -> None:
    logits_nv, targets_n, ids_nk, logprobs_nk = case(3, 6, 8, sharpness)
    logits_nv = logits_nv.to(dtype).requires_grad_()
    found = loss(logits_nv, targets_n, ids_nk, logprobs_nk, share)
    found.total.backward()
    assert torch.isfinite(found.total)
    assert torch.isfinite(logits_nv.grad).all()
    assert found.total.dtype == torch.float32


def test_the_gradient_of_ce_is_softmax_less_one_hot() -> None:
    logits_nv, targets_n, ids_nk, logprobs_nk = case(4, 3, 8, 1.0)
    logits_nv.requires_grad_()
    loss(logits_nv, targets_n, ids_nk, logprobs_nk, 1.0).total.backward()
    expected = (logits_nv.detach().softmax(-1) - torch.nn.functional.one_hot(targets_n, VOCAB)) / 3
    torch.testing.assert_close(logits_nv.grad, expected, atol=1e-6, rtol=0)


def test_steps_down_the_kl_reach_the_targets_top_k() -> None:
    logits_nv, targets_n, ids_nk, logprobs_nk = case(5, 2, 8, 2.0)
    logits_nv.requires_grad_()
    optimiser = torch.optim.Adam([logits_nv], lr=0.1)
    for _ in range(300):
        optimiser.zero_grad()
        loss(logits_nv, targets_n, ids_nk, logprobs_nk, 0.0).total.backward()
        optimiser.step()
    own = logits_nv.detach().log_softmax(-1).gather(1, ids_nk)
    torch.testing.assert_close(own, logprobs_nk, atol=2e-2, rtol=0)


def rows_of(shape: list[tuple[int, int]], seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt, continuation in shape:
        tokens = torch.randint(0, VOCAB, (prompt + continuation,), generator=generator)
        top = torch.randn(continuation, VOCAB, generator=generator).log_softmax(-1).topk(5)
        rows.append(Row(tokens[:prompt], tokens[prompt:], top.indices, top.values.half().float()))
    return rows


def logits_of(decoder: Decoder, rows: list[Row]) -> tuple[torch.Tensor, ...]:
    batch = collate(rows)
    hidden = decoder(batch.tokens_bt, torch.arange(batch.tokens_bt.shape[1])[None])
    logits_nv = decoder.logits(hidden.flatten(0, 1)[batch.predictors_n])
    return logits_nv, batch.targets_n, batch.topk_ids_nk, batch.topk_logprobs_nk


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=5), st.integers(0, 99)
)
def test_padding_never_changes_a_rows_loss(shape: list[tuple[int, int]], seed: int) -> None:
    decoder = small_decoder("qwen3", seed=91)
    rows = rows_of(shape, seed)
    together = logits_of(decoder, rows)
    ends = np.cumsum([0, *(len(row.continuation) for row in rows)])
    for index, row in enumerate(rows):
        own = tuple(part[ends[index] : ends[index + 1]] for part in together)
        alone = logits_of(decoder, [row])
        torch.testing.assert_close(own[0], alone[0], atol=1e-4, rtol=0)
        for mine, theirs in zip(loss(*own, 0.5)[:3], loss(*alone, 0.5)[:3], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 10, 2.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0 < rates[99] < 0.01
    assert learning_rate(0, 1, 0, 2.0) == 2.0
