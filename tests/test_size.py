"""The weight of a submission: exact to the byte, and every entry that the grader would refuse, by name."""

import json
import os

import pytest

from stages.errors import UserError
from stages.profile import Limits, load_profile
from stages.size import ROOT, component, main, survey, verdict

LIMITS = Limits(limit_bytes=10_000, reserve_bytes=4_000)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "output"
    for name, size in {
        "model.safetensors": 5000, "serve.sh": 100, "drafter/server.py": 300, "wheels/a.whl": 200,
        "evidence/logs/teacher.log": 50, "config.json": 7,
    }.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return place


def pad(folder, total, name="pad.bin"):
    """Bring a submission to a total with one sparse file: it takes no room on the disk."""
    missing = total - survey(folder).total_bytes
    with (folder / name).open("wb") as stream:
        stream.truncate(missing)
    assert (folder / name).stat().st_blocks == 0


def test_bytes_by_component(folder):
    found = survey(folder)
    parts = {"weights": 5000, "wheels": 200, "code": 400, "evidence": 50, "other": 7}
    assert found.by_component() == parts
    assert (found.total_bytes, found.faults) == (5657, ())
    assert component("drafter/codecs/int4.py") == "code"
    assert component("evidence/source/serve.sh") == "evidence"


def test_exactly_at_the_limit_passes_and_one_byte_more_fails(folder):
    pad(folder, LIMITS.limit_bytes)
    assert verdict(survey(folder), LIMITS) == []
    pad(folder, LIMITS.limit_bytes + 1, name="one-more.bin")
    (sentence,) = verdict(survey(folder), LIMITS)
    assert "10,001 bytes are 1 over the limit of 10,000" in sentence
    assert "weights 5,000, wheels 200, code 400" in sentence


@pytest.mark.parametrize("over", [0, 1])
def test_the_command_fails_on_the_first_byte_over_the_profiles_limit(folder, over, capsys):
    (folder / "twin.json").hardlink_to(folder / "config.json")
    limit = load_profile("smollm2", ROOT / "profiles").limits.limit_bytes
    pad(folder, limit + over)
    assert main([str(folder), "--profile", "smollm2"]) == over
    assert ("1 over the limit" in capsys.readouterr().err) == bool(over)


@pytest.mark.parametrize("over", [0, 1])
def test_the_contests_limit_to_the_byte(folder, over):
    pad(folder, 1_000_000_000 + over)
    contest = Limits(limit_bytes=1_000_000_000, reserve_bytes=20_000_000)
    assert len(verdict(survey(folder), contest)) == over


def test_hard_links_count_each_and_links_count_their_target(folder):
    before = survey(folder).total_bytes
    (folder / "again.safetensors").hardlink_to(folder / "model.safetensors")
    (folder / "drafter" / "weights").symlink_to("../model.safetensors")
    (folder / "evidence" / "further").symlink_to("../drafter/weights")
    found = survey(folder)
    assert found.faults == ()
    assert found.total_bytes == before + 3 * 5000
    by_name = {file.name: file for file in found.files}
    assert by_name["evidence/further"].path.name == "model.safetensors"


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        ({"a": "/etc/hostname"}, "absolute path"),
        ({"a": "../vendor/x"}, "leads out of the submission"),
        ({"drafter/a": "../../output/config.json"}, "leads out of the submission"),
        ({"a": "nowhere.txt"}, "a file that is not there (nowhere.txt)"),
        ({"a": "drafter"}, "a link to a folder"),
        ({"a": "b", "b": "a"}, "leads back to itself (a -> b -> a)"),
        ({"a": "a"}, "leads back to itself (a -> a)"),
        ({"a": "b", "b": "/etc/hostname"}, "absolute path"),
        ({"a": "."}, "a link to a folder"),
    ],
)
def test_bad_links_are_named_with_their_reason(folder, links, reason):
    (folder.parent / "vendor").mkdir()
    (folder.parent / "vendor" / "x").write_text("upstream")
    for name, target in links.items():
        (folder / name).symlink_to(target)
    name = next(iter(links))
    found = survey(folder)
    assert reason in dict(found.faults)[name]
    assert all(file.name not in links for file in found.files)
    assert f"{name} is a link" in verdict(found, LIMITS)[0]


def test_a_link_through_a_linked_folder_cannot_get_out(folder):
    (folder.parent / "vendor").mkdir()
    (folder.parent / "vendor" / "x").write_text("upstream")
    (folder / "door").symlink_to("../vendor")
    (folder / "a").symlink_to("door/x")
    assert "leads out" in dict(survey(folder).faults)["a"]


def test_other_entries_are_refused(folder):
    os.mkfifo(folder / "pipe")
    (folder / os.fsdecode(b"caf\xe9")).write_text("")
    assert survey(folder).faults == (
        ("caf\\xe9", "has a name that is not UTF-8"),
        ("pipe", "is neither a file nor a folder"),
    )


def test_command_line(folder, capsys):
    assert main([str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == 5657
    assert main([str(folder)]) == 0
    assert "5,657" in capsys.readouterr().out
    (folder / "a").symlink_to("/etc/hostname")
    assert main([str(folder)]) == 1
    assert main([str(folder / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main([str(folder), "--profile", "smollm3"]) == 2
    with pytest.raises(UserError):
        survey(folder / "none")
