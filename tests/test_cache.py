"""The KV cache: ragged rows next to each other, each as if it were alone."""

import itertools

import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.cache import KVCache, prefill_groups
from drafter.model import Decoder

DECODER = small_decoder("qwen3", seed=11)
COLUMNS = 40
pieces = st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=9), min_size=1, max_size=4)


def alone(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """The last hidden state of a row by itself, without a cache."""
    return decoder(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0, -1]


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(pieces, min_size=1, max_size=5))
@torch.inference_mode()
def test_rows_grow_side_by_side_as_if_alone(rows: list[list[list[int]]]) -> None:
    """Each row takes its pieces in turn; those that have none left leave the batch."""
    cache = KVCache.empty(DECODER, len(rows), COLUMNS)
    texts: list[list[int]] = [[] for _ in rows]
    for turn in range(max(map(len, rows))):
        staying = [i for i, row in enumerate(rows) if turn < len(row)]
        if len(staying) < len(rows):
            cache.keep(staying)
            rows, texts = [rows[i] for i in staying], [texts[i] for i in staying]
        texts = [text + row[turn] for text, row in zip(texts, rows, strict=True)]
        hidden_bd = cache.extend(DECODER, slice(0, len(rows)), [row[turn] for row in rows])
        assert cache.lengths == [len(text) for text in texts]
        for hidden_d, text in zip(hidden_bd, texts, strict=True):
            torch.testing.assert_close(hidden_d, alone(DECODER, text), atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_padding_is_written_to_the_scratch_column_only() -> None:
    cache = KVCache.empty(DECODER, 3, COLUMNS)
    cache.extend(DECODER, slice(0, 3), [[1], [2, 3, 4, 5, 6], [7, 8]])
    for row, size in enumerate((1, 5, 2)):
        written_c = cache.keys_lbkcd[:, row].abs().sum((0, 1, 3)) > 0
        assert written_c[:size].all()
        assert not written_c[size:-1].any()


@torch.inference_mode()
def test_rubbish_beyond_a_row_is_never_read() -> None:
    """What a longer row or an earlier use left behind is overwritten before it can be seen."""
    clean, dirty = (KVCache.empty(DECODER, 2, COLUMNS) for _ in range(2))
    dirty.keys_lbkcd.fill_(1e4)
    dirty.values_lbkcd.fill_(1e4)
    for cache in (clean, dirty):
        cache.extend(DECODER, slice(0, 2), [[1, 2, 3], [4]])
    tokens = [[5], [6, 7, 8, 9]]
    hidden = [cache.extend(DECODER, slice(0, 2), tokens) for cache in (clean, dirty)]
    torch.testing.assert_close(hidden[0], hidden[1], atol=0, rtol=0)


@torch.inference_mode()
def test_a_row_may_fill_its_last_column() -> None:
    cache = KVCache.empty(DECODER, 2, 8)
    cache.extend(DECODER, slice(0, 2), [[1, 2, 3, 4, 5, 6, 7], [1]])
    hidden_bd = cache.extend(DECODER, slice(0, 2), [[8], [2]])
    torch.testing.assert_close(hidden_bd[0], alone(DECODER, [1, 2, 3, 4, 5, 6, 7, 8]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(hidden_bd[1], alone(DECODER, [1, 2]), atol=2e-5, rtol=1e-4)


@settings(max_examples=300)
@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=40).map(sorted))
def test_prefill_groups_part_the_rows_and_bound_the_padding(sizes: list[int]) -> None:
    groups = prefill_groups(sizes)
    assert [row for group in groups for row in range(group.start, group.stop)] == list(range(len(sizes)))
    for group in groups:
        rows = sizes[group]
        assert rows
        assert max(rows) * len(rows) <= 2 * sum(rows)


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 2000), min_size=2, max_size=40).map(sorted))
def test_prefill_groups_are_no_smaller_than_they_must_be(sizes: list[int]) -> None:
    groups = prefill_groups(sizes)
    for group, following in itertools.pairwise(groups):
        grown = sizes[group.start : following.start + 1]
        assert max(grown) * len(grown) > 2 * sum(grown)
