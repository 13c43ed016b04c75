"""Rows on their way to a file: all of them, in an order that further ones do not disturb."""

from pathlib import Path

from stages.spool import Spool


def written(folder: Path, names: list[str]) -> list[str]:
    spool = Spool(folder / "spool")
    for name in names:
        spool.add(name, f"line of {name} \u2028 é")
    assert spool.count == len(names)
    spool.write(folder / "out.jsonl")
    assert not (folder / "spool").exists()
    return (folder / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]


def test_every_line_once_and_shuffled(tmp_path: Path) -> None:
    names = [f"row {number:04}" for number in range(3000)]
    found = written(tmp_path, names)
    assert sorted(found) == [f"line of {name} \u2028 é" for name in names]
    assert found != sorted(found)


def test_further_lines_disturb_no_order(tmp_path: Path) -> None:
    few = written(tmp_path, [f"row {number}" for number in range(500)])
    many = written(tmp_path, [*(f"other {number}" for number in range(500)),
                              *(f"row {number}" for number in reversed(range(500)))])
    assert [line for line in many if "row" in line] == few


def test_what_a_killed_run_left_is_not_written(tmp_path: Path) -> None:
    Spool(tmp_path / "spool").add("old", "old")
    assert written(tmp_path, ["new"]) == ["line of new \u2028 é"]
