"""Fidelity: continuations that come with conversations are reproduced before anything else is written."""

import json
from pathlib import Path

import pytest
from mill import Mill, finished

from stages.errors import UserError
from stages.fidelity import agreement, check_fidelity, file_of, read_fidelity
from stages.files import read_jsonl, write_json

CAP = 24  # the toy profile's teacher.max_tokens


def test_agreement_is_the_mean_share_before_the_first_difference() -> None:
    given = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [5], [1, 2, 3], [7] * 9]
    found = [[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3], [6], [1, 2], [7] * 6]
    shares = [1, 1 / 4, 1, 0, 2 / 3, 1]
    assert agreement(given, found, 6) == {
        "conversations": 6, "whole": 2, "whole_share": 0.3333, "prefix_share": round(sum(shares) / 6, 4)}


def test_dev_alone_stops_a_run_and_only_below_the_threshold(tmp_path: Path) -> None:
    check_fidelity(tmp_path, 1.0)  # nothing is known
    same = {"conversations": 4, "whole": 1, "whole_share": 0.25}
    write_json(file_of(tmp_path, "examples"), same | {"prefix_share": 0.0})
    check_fidelity(tmp_path, 1.0)
    write_json(file_of(tmp_path, "dev"), same | {"prefix_share": 0.5})
    check_fidelity(tmp_path, 0.5)
    less = r"on dev: 50\.0% .* \(mean of 4\), 1 reproduced whole: less than teacher\.min_fidelity \(0\.51\)"
    with pytest.raises(UserError, match=less):
        check_fidelity(tmp_path, 0.51)
    assert list(read_fidelity(tmp_path, ["dev", "examples"])) == ["dev", "examples"]


def with_continuations(mill: Mill, name: str, spoil: tuple[int, ...]) -> dict[str, list[int]]:
    """Give a set the teacher's own continuations, the first token changed where `spoil` says; return them."""
    own = {row["id"]: row["continuation"] for row in read_jsonl(mill.folder("teacher") / f"{name}.jsonl")}
    for index in spoil:
        one = own[sorted(own)[index]]
        one[0] = 3 + (one[0] == 3)
    rows = read_jsonl(mill.root / "examples" / f"{name}.jsonl")
    mill.write(f"examples/{name}.jsonl", "".join(
        json.dumps(row | {"continuation": own[row["id"]]}) + "\n" for row in rows))
    return own


def test_too_low_a_fidelity_stops_before_anything_is_written(
        tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mill = finished(tmp_path_factory).copy(tmp_path / "copy")
    dev = with_continuations(mill, "dev", spoil=(2, 5))
    with_continuations(mill, "examples", spoil=(0, 1, 2, 3))
    mill.forget("teacher")
    mill.replace("profiles/toy.toml", "stop_on_repeat = 4", "stop_on_repeat = 4\nmin_fidelity = 0.8")
    monkeypatch.setenv("NPROC", "2")
    said = mill.run("teacher", "--with-upstream", code=2)
    assert said.count("fidelity on dev: 75.0% of a given continuation's tokens reproduced before the first "
                      "difference (mean of 8), 6 reproduced whole: less than teacher.min_fidelity (0.8)") == 1
    assert not [event for event in mill.events("teacher") if event["event"] == "shard"]
    assert not [path.name for path in mill.work("teacher", "*.*") if not path.name.startswith("fidelity-")]
    monkeypatch.delenv("NPROC")
    mill.replace("profiles/toy.toml", "min_fidelity = 0.8", "min_fidelity = 0.7")
    mill.run("teacher")
    assert mill.metrics("teacher")["fidelity"] == {
        "dev": {"conversations": 8, "whole": 6, "whole_share": 0.75, "prefix_share": 0.75},
        "examples": {"conversations": 4, "whole": 0, "whole_share": 0.0, "prefix_share": 0.0},
    }
    found = {row["id"]: row["continuation"] for row in read_jsonl(mill.folder("teacher") / "dev.jsonl")}
    assert found == dev  # what was given stands
    assert not [name for name in mill.files("teacher") if name.startswith("fidelity-")]
