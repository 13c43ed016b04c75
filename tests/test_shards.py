"""Teacher shards: what was written is read, and what is cut is refused."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drafter.engine import Generated
from stages.errors import UserError
from stages.training.rows import read_rows
from stages.training.shards import read_tally, write_shard
from stages.training.tally import added, repeats, report, tally

K = 3
ids = st.integers(0, 150_000)
logprobs = st.floats(-30, 0, width=16)


@st.composite
def generations(draw: st.DrawFn) -> tuple[list[int], Generated]:
    length = draw(st.integers(0, 5))
    size = length * K
    row = Generated(
        draw(st.lists(ids, min_size=length, max_size=length)),
        torch.tensor(draw(st.lists(ids, min_size=size, max_size=size)), dtype=torch.int32).view(-1, K),
        torch.tensor(draw(st.lists(logprobs, min_size=size, max_size=size))).view(-1, K),
        draw(st.sampled_from(["cap", "stop", "repeat"])),
    )
    return draw(st.lists(ids, min_size=1, max_size=5)), row


def one(token: int, length: int = 2) -> Generated:
    ids, logprobs = [[token, 1, 2]] * length, [[-0.5, -1.0, -2.0]] * length
    return Generated([token] * length, torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs), "stop")


@given(st.lists(generations(), max_size=6))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    folder = tmp_path_factory.mktemp("shards")
    path = folder / "train-00000.safetensors"
    write_shard(path, [prompt for prompt, _ in rows], [row for _, row in rows])
    kept = [(prompt, row) for prompt, row in rows if row.tokens]
    counts = added([read_tally(path)]).get("", Counter())
    assert (counts["rows"], counts["tokens"]) == (len(kept), sum(len(row.tokens) for _, row in kept))
    if not kept:
        with pytest.raises(UserError, match="no training row has a continuation"):
            read_rows(folder)
        return
    for found, (prompt, row) in zip(read_rows(folder), kept, strict=True):
        assert found.prompt.tolist() == prompt
        assert found.continuation.tolist() == row.tokens
        assert found.topk_ids.tolist() == row.topk_ids.tolist()
        assert found.topk_logprobs.tolist() == row.topk_logprobs.tolist()
        assert found.topk_logprobs.dtype == torch.float16
        assert {found.prompt.dtype, found.continuation.dtype, found.topk_ids.dtype} == {torch.int32}


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_shard(tmp_path / name, [[1, 2], [3]], [one(5), one(6)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_shards_are_read_in_order_and_nothing_else(tmp_path: Path) -> None:
    for index in (2, 0, 1, 10):
        write_shard(tmp_path / f"train-{index:05d}.safetensors", [[index]], [one(index)])
    (tmp_path / "dev.jsonl").write_text("{}")
    assert [int(row.prompt[0]) for row in read_rows(tmp_path)] == [0, 1, 2, 10]


def test_an_empty_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: no training row"):
        read_rows(tmp_path)


@pytest.mark.parametrize("end", [0, 5, 40, 300, -1])
def test_a_cut_shard_is_refused_by_name_and_made_again(tmp_path: Path, end: int) -> None:
    path = tmp_path / "train-00000.safetensors"
    write_shard(path, [[1, 2], [3]], [one(5), one(6)])
    path.write_bytes(path.read_bytes()[:end])
    assert read_tally(path) is None
    with pytest.raises(UserError, match=f"{path}: .*run `make teacher` again"):
        read_rows(tmp_path)


def test_a_shard_that_is_not_there_has_no_tally(tmp_path: Path) -> None:
    assert read_tally(tmp_path / "train-00000.safetensors") is None


def test_a_file_of_other_tensors_is_no_shard(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "train-00000.safetensors")
    with pytest.raises(UserError, match="not a whole shard"):
        read_rows(tmp_path)


def test_a_report_tells_shares_by_category() -> None:
    loop = Generated([1, 2, 3] * 10, ended="cap")
    long = Generated(list(range(40)), torch.zeros(40, 1).int(), torch.full((40, 1), 0.5).log(), "stop")
    short = Generated([5], torch.zeros(1, 1).int(), torch.full((1, 1), 0.25).log(), "repeat")
    first = tally(["a", "a", "b"], [loop, long, Generated([])])
    found = report(added([first, tally(["b"], [short])]))
    categories = found.pop("categories")
    assert found == {"rows": 3, "tokens": 71, "stop_share": 0.3333, "loop_share": 0.6667,
                     "mean_top1_probability": round((20 + 0.25) / 71, 4),
                     "lengths": {"1-8": 1, "9-32": 1, "33-64": 1}}
    assert categories["a"]["loop_share"] == 0.5
    assert (categories["b"]["rows"], categories["b"]["stop_share"]) == (1, 0.0)
    assert report({}) == {"rows": 0, "tokens": 0, "categories": {}}


def test_a_loop_is_more_than_eight_8_grams_that_stand_twice() -> None:
    text = list(range(100, 130))
    assert repeats(text) == 0
    assert repeats(text[:16] + text[:16]) == 9
    assert tally(["x", "x"], [Generated(text[:16] * 2), Generated(text[:15] * 2)])["x"]["loops"] == 1
