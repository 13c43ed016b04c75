"""The two baselines: what they draft."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from stages.errors import UserError
from stages.rehearsal.baselines import fit_trigrams, prompt_lookup, trigrams_of


def fit(*rows):
    return fit_trigrams(np.concatenate([np.array(row) for row in rows]), np.cumsum([0, *map(len, rows)]))


def test_trigrams_come_before_bigrams_before_unigrams():
    table = fit([1, 2, 3, 1, 2, 3, 9, 2, 4, 9, 2, 4, 9, 2, 4])
    assert table.draft([1, 2])[0] == 3  # after (1, 2) always 3
    assert table.draft([7, 2])[0] == 4  # after (7, 2) nothing is known; after 2 most often 4
    assert table.draft([7, 8])[0] == 2  # after 8 nothing is known; 2 is the most frequent id
    assert table.draft([])[0] == 2
    assert len(table.draft([1])) == 16


def test_trigrams_do_not_reach_over_the_end_of_a_continuation():
    apart = fit([5, 6], [7, 8], [7, 8])
    assert (6, 5) not in [divmod(key, apart.base) for key in apart.after_two]
    assert 6 not in apart.after_one
    assert not apart.after_two


def test_ids_that_training_never_saw_meet_nobody_elses_entry():
    table = fit([1, 2, 3])  # the base is 4, so a pair (0, 6) would have the number of (1, 2)
    assert table.draft([0, 6])[0] == table.after_none


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=5))
def test_trigrams_are_the_most_frequent(rows):
    if not any(rows):
        return
    table = fit(*rows)
    counts = {}
    for row in rows:
        for a, b, c in zip(row, row[1:], row[2:], strict=False):
            counts.setdefault((a, b), {}).setdefault(c, 0)
            counts[a, b][c] += 1
    best = {a * table.base + b: min(c, key=lambda t: (-c[t], t)) for (a, b), c in counts.items()}
    assert best == table.after_two


@pytest.mark.parametrize(
    ("context", "draft"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 3, 7, 8, 3, 9, 1, 2, 3], [7, 8, 3, 9, 1, 2, 3]),  # three ids beat the later match of one
        ([3, 7, 3, 8, 3], [8, 3]),  # of equals the latest
        ([5, 5, 5, 5], [5]),
        ([0, *range(1, 30), 0], list(range(1, 17))),  # sixteen at most
    ],
)
def test_prompt_lookup(context, draft):
    assert prompt_lookup(context) == draft


def test_reads_the_teachers_shards(tmp_path):
    for index, rows in enumerate(([[1, 2, 3], [4]], [[1, 2, 3, 1, 2, 9, 1, 2, 9]])):
        ids = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        tensors = {"continuation_ids": ids, "continuation_offsets": offsets}
        save_file(tensors, tmp_path / f"train-{index:05d}.safetensors")
    table = trigrams_of(tmp_path)
    assert table.draft([1, 2])[0] == 3  # twice 3, twice 9: of equals the smallest
    assert (table.base, table.after_none) == (10, 1)
    with pytest.raises(UserError, match="Run make teacher"):
        trigrams_of(tmp_path / "nowhere")
