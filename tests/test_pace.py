"""The teacher's pace: what each run had a part in, whoever was killed."""

import os
from pathlib import Path

import pytest

from stages.pace import next_run, note, paces, told


def test_runs_and_their_ranks_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (next_run(tmp_path), paces(tmp_path)) == (0, [])
    monkeypatch.setattr(os, "getpid", lambda: 7)
    note(tmp_path, 0, "a", 600, 2.0)
    note(tmp_path, 0, "b", 600, 2.0)
    monkeypatch.setattr(os, "getpid", lambda: 8)
    note(tmp_path, 0, "c", 800, 1.0)
    assert next_run(tmp_path) == 1
    note(tmp_path, 1, "d", 1500, 0.5)
    found = paces(tmp_path)
    assert found == [{"ranks": 2, "tokens": 2000, "seconds": 4.0, "tokens_per_second": 500},
                     {"ranks": 1, "tokens": 1500, "seconds": 0.5, "tokens_per_second": 3000}]
    assert told(found[1]) == "1,500 tokens in 0.5 s, 3,000 a second"


def test_a_line_that_a_full_disk_cut_off_costs_only_itself(tmp_path: Path) -> None:
    note(tmp_path, 0, "a", 100, 1.0)
    with (tmp_path / "pace.jsonl").open("a") as stream:
        stream.write('{"run": 0, "rank": 7, "sh')
    assert next_run(tmp_path) == 1
    note(tmp_path, 1, "b", 300, 1.0)
    assert [run["tokens"] for run in paces(tmp_path)] == [100, 300]
    (tmp_path / "pace.jsonl").write_bytes(b'\xff\n[]\n7\n{"run": "0"}\n')
    assert (next_run(tmp_path), paces(tmp_path)) == (0, [])


def test_a_shard_that_a_killed_run_never_named_counts_where_it_was_written_again(tmp_path: Path) -> None:
    for run, shard in ((0, "a"), (0, "b"), (1, "b")):
        note(tmp_path, run, shard, 100, 1.0)
    assert [run["tokens"] for run in paces(tmp_path)] == [100, 100]
