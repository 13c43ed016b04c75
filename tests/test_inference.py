"""The forward pass of inference: flat ragged rows over slots give what whole rows alone give."""

import itertools
import random

import pytest
import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.inference import Inference, joined
from drafter.model import Decoder
from drafter.plain import NewTokens

COLUMNS = 40
pieces = st.lists(st.lists(st.integers(0, 96), min_size=0, max_size=9), min_size=1, max_size=4)
DECODERS = {family: small_decoder(family, seed=11) for family in ("llama", "qwen3")}
PASSES = {family: Inference(decoder, COLUMNS) for family, decoder in DECODERS.items()}


def alone(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """The last hidden states of a row by itself, without a cache."""
    return decoder(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0]


def cache(decoder: Decoder, slots: int, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    config = decoder.config
    shape = (config.layers, slots, config.kv_heads, COLUMNS, config.head_dim)
    return torch.full(shape, fill), torch.full(shape, fill)


def run(inference: Inference, cached: tuple[torch.Tensor, torch.Tensor], slots: list[int], lengths: list[int],
        tokens: list[list[int]]) -> torch.Tensor:
    sizes = torch.tensor([len(row) for row in tokens])
    new = NewTokens(sizes.cumsum(0) - sizes, sizes, torch.tensor(lengths), torch.tensor(slots))
    flat = torch.tensor(list(itertools.chain.from_iterable(tokens)))
    return inference.hidden(flat, inference.attend(cached, new))


@settings(max_examples=60)
@given(rows=st.lists(pieces, min_size=1, max_size=5), family=st.sampled_from(sorted(DECODERS)),
       seed=st.integers(0, 9))
@torch.inference_mode()
def test_rows_grow_side_by_side_as_if_alone(rows: list[list[list[int]]], family: str, seed: int) -> None:
    """Each row takes its pieces in turn, in any slot; a piece may be empty, and rubbish fills the cache."""
    decoder, inference = DECODERS[family], PASSES[family]
    cached = cache(decoder, 7, fill=1e4)
    slots = random.Random(seed).sample(range(7), len(rows))
    texts: list[list[int]] = [[] for _ in rows]
    for turn in range(4):
        new = [row[turn] if turn < len(row) else [] for row in rows]
        if not any(new):
            continue
        hidden_nd = run(inference, cached, slots, [len(text) for text in texts], new)
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        expected = [alone(decoder, text)[len(text) - len(more) :]
                    for text, more in zip(texts, new, strict=True) if more]
        torch.testing.assert_close(hidden_nd, torch.cat(expected), atol=2e-5, rtol=1e-4)
    for slot in set(range(7)) - set(slots):
        assert (cached[0][:, slot] == 1e4).all()
    for slot, text in zip(slots, texts, strict=True):
        assert (cached[1][:, slot, :, len(text) :] == 1e4).all()


@torch.inference_mode()
def test_a_row_may_fill_its_last_column() -> None:
    decoder, inference = DECODERS["llama"], PASSES["llama"]
    text, cached = [number % 97 for number in range(COLUMNS)], cache(DECODERS["llama"], 1)
    run(inference, cached, [0], [0], [text[:-1]])
    found = run(inference, cached, [0], [COLUMNS - 1], [text[-1:]])
    torch.testing.assert_close(found[0], alone(decoder, text)[-1], atol=2e-5, rtol=1e-4)


def test_joined_matrices_are_held_once() -> None:
    decoder = small_decoder("qwen3", seed=3)
    own = decoder.model.layers[0].self_attn
    parts = [own.q_proj, own.k_proj, own.v_proj]
    before = [part.weight.clone() for part in parts]
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(before))
    assert all(torch.equal(part.weight, weight) for part, weight in zip(parts, before, strict=True))
    assert joined(parts).data_ptr() == whole.data_ptr()  # a second engine joins nothing anew
    with torch.no_grad():
        own.k_proj.weight.fill_(5)
    assert (whole[len(own.q_proj.weight) :][: len(own.k_proj.weight)] == 5).all()
    assert list(decoder.state_dict()) == list(small_decoder("qwen3").state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_pass_has_the_very_numbers_of_the_decoder_where_nothing_is_cached(dtype: torch.dtype) -> None:
    decoder = small_decoder("qwen3", seed=3).to(dtype)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = alone(decoder, text)
    inference = Inference(decoder, COLUMNS)
    config = decoder.config
    cached = tuple(torch.zeros(config.layers, 1, config.kv_heads, COLUMNS, config.head_dim, dtype=dtype)
                   for _ in range(2))  # fmt: skip
    torch.testing.assert_close(run(inference, cached, [0], [0], [text]), expected,
                               atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)
