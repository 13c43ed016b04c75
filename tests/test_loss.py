"""The loss against its formula in float64 and autograd, and what packing may never do to it."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd

from stages.training import loss as module
from stages.training.batches import collate
from stages.training.loss import TINY, Loss, Targets, drafter_loss, learning_rate
from stages.training.network import Network, run_layer
from stages.training.rows import Row

VOCAB = 97
ONES = torch.eye(VOCAB)


def loss(logits_nv: torch.Tensor, targets_n: torch.Tensor, ids_nk: torch.Tensor, logprobs_nk: torch.Tensor,
         share: float) -> Loss:
    """The loss of logits themselves: hidden states that an output matrix of ones leaves as they are."""
    targets = Targets(targets_n, ids_nk, logprobs_nk)
    return drafter_loss(logits_nv, ONES.to(logits_nv.dtype), targets, share)


def plain(logits_nv: torch.Tensor, targets: Targets, share: float) -> torch.Tensor:
    """The same in plain operations, for autograd to differentiate."""
    own_nv = logits_nv.log_softmax(-1)
    ce = -own_nv.gather(1, targets.tokens_n[:, None]).mean()
    if targets.hidden_nh is not None:
        target_nv = (targets.hidden_nh @ targets.head_vh.T).log_softmax(-1)
        return share * ce + (1 - share) * (target_nv.exp() * (target_nv - own_nv)).sum(-1).mean()
    own_nk, p = own_nv.gather(1, targets.ids_nk), targets.logprobs_nk.exp()
    p_rest, q_rest = ((1 - x.sum(-1)).clamp(min=TINY) for x in (p, own_nk.exp()))
    kl = (p * (targets.logprobs_nk - own_nk)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
    return share * ce + (1 - share) * kl.mean()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_gradients_are_autograds_however_positions_are_chunked(
        whole: bool, rows: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", rows * VOCAB)
    generator = torch.Generator().manual_seed(rows)
    hidden_nd, head_vd, target_nh, target_vh = (
        torch.randn(count, 12, generator=generator) for count in (9, VOCAB, 9, VOCAB))
    _, targets_n, ids_nk, logprobs_nk = case(rows, 9, 6, 1.0)
    targets_n[::2] = (ids_nk.max(1).values[::2] + 1) % VOCAB  # a token beside the top-k, as bfloat16 has it
    targets = Targets(targets_n, ids_nk, logprobs_nk, *((target_nh, target_vh) if whole else ()))
    found, expected = [], []
    for gradients, of in ((found, lambda *x: drafter_loss(*x, targets, share).total),
                          (expected, lambda h, w: plain(h @ w.T, targets, share))):
        leaves = [x.clone().requires_grad_() for x in (hidden_nd, head_vd)]
        total = of(*leaves)
        (3 * total).backward()
        gradients += [total.detach(), *(leaf.grad for leaf in leaves)]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


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


@settings(max_examples=60)
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


def network_of(decoder: torch.nn.Module, **options: bool) -> Network:
    network = Network(decoder.config, torch.float32, "cpu", **options)
    network.load({name: value.detach() for name, value in decoder.named_parameters()})
    for weight in network.weights.values():
        weight.requires_grad_()
    return network


def packed(network: Network, rows: list[Row], **size: int) -> list[torch.Tensor]:
    """Loss and gradients of rows in one pass."""
    batch = collate(rows, **size)
    known = Targets(batch.targets_n, batch.topk_ids_nk, batch.topk_logprobs_nk)
    total = network.backward(batch, known, 0.5).total
    gradients = [weight.grad for weight in network.weights.values()]
    for weight in network.weights.values():
        weight.grad = None
    return [total.detach(), *gradients]


def padded(decoder: torch.nn.Module, rows: list[Row]) -> list[torch.Tensor]:
    """The same, each row padded on the right to the longest, by plain operations and autograd."""
    texts = [torch.cat((row.prompt, row.continuation[:-1])) for row in rows]
    tokens_bt = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden_btd = decoder(tokens_bt, torch.arange(tokens_bt.shape[1])[None])
    hidden_nd = torch.cat([hidden_btd[index, len(row.prompt) - 1 : len(text)]
                           for index, (row, text) in enumerate(zip(rows, texts, strict=True))])
    parts = [torch.cat([getattr(row, name) for row in rows])
             for name in ("continuation", "topk_ids", "topk_logprobs")]
    total = plain(hidden_nd @ decoder.head_weight.T, Targets(*parts), 0.5)
    weights = list(decoder.parameters())
    return [total.detach(), *torch.autograd.grad(total, weights)]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=5), st.integers(0, 99),
    st.booleans(),
)
def test_packed_and_padded_rows_have_the_same_loss_and_gradients(
        shape: list[tuple[int, int]], seed: int, checkpointing: bool) -> None:
    decoder = small_decoder("qwen3", seed=91).requires_grad_()
    rows = rows_of(shape, seed)
    network = network_of(decoder, checkpointing=checkpointing)
    expected = padded(decoder, rows)
    torch.testing.assert_close(packed(network, rows), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed(network, rows, width=200, longest=32), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=5), st.integers(0, 99)
)
def test_no_token_sees_another_row(shape: list[tuple[int, int]], seed: int) -> None:
    network = network_of(small_decoder("llama", seed=91))
    rows, others = rows_of(shape, seed), rows_of(shape, seed + 1)
    together = network.hidden(collate([rows[0], *others[1:]]))
    size = shape[0][0] + shape[0][1] - 1
    assert torch.equal(together[:size], network.hidden(collate(rows))[:size])
    last = network.hidden(collate([*others[:-1], rows[-1]]))
    size = shape[-1][0] + shape[-1][1] - 1
    assert torch.equal(last[-size:], network.hidden(collate(rows))[-size:])


def test_all_layers_compile_to_one_graph_of_the_same_numbers() -> None:
    decoder = small_decoder("qwen3", seed=91)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain_one, compiled = network_of(decoder), network_of(decoder)
    compiled.layer = torch.compile(run_layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True,
                                   dynamic=False)
    for shape in ([(4, 5), (3, 7)], [(4, 6), (3, 3), (5, 5)], [(9, 2)]):
        rows = rows_of(shape, 3)
        torch.testing.assert_close(packed(compiled, rows, width=40, longest=32),
                                   packed(plain_one, rows, width=40, longest=32), atol=1e-6, rtol=1e-5)
    assert len(graphs) == 2  # one forwards, one backwards, for every layer and every cut into rows


def test_the_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 10, 2.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0 < rates[99] < 0.01
    assert learning_rate(0, 1, 0, 2.0) == 2.0
