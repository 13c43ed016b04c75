"""Records: complete, standard in form, and verified against every byte."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from workshop import Workshop

from stages.files import canonical_json
from stages.wrapper.record import read_record


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("records") / "house")
    shop.run("all")
    return shop


def test_the_form_is_in_toto_and_slsa(built: Workshop) -> None:
    record = built.record("distill")
    assert record["_type"] == "https://in-toto.io/Statement/v1"
    assert record["predicateType"] == "https://slsa.dev/provenance/v1"
    assert all(re.fullmatch(r"[0-9a-f]{64}", subject["digest"]["sha256"]) for subject in record["subject"])
    build, details = record["predicate"]["buildDefinition"], record["predicate"]["runDetails"]
    assert {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"} == build.keys()
    assert {"builder", "metadata", "byproducts"} == details.keys()
    assert details["builder"]["id"].endswith(":host")


def test_the_key_follows_from_the_record_alone(built: Workshop) -> None:
    """By hand, as a reviewer without this program would do it."""
    for stage in ("fetch", "data", "distill", "pack"):
        record = built.record(stage)
        build = record["predicate"]["buildDefinition"]
        definition = build["externalParameters"] | build["internalParameters"]
        definition |= {"code": {}, "inputs": {}, "files": {}}
        for dependency in build["resolvedDependencies"]:
            kind, name = dependency["name"].split("/", 1)
            definition[kind][name] = dependency["digest"]["sha256"]
        text = json.dumps(definition, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        stated = record["predicate"]["runDetails"]["metadata"]["draftmill_key"]
        assert hashlib.sha256(text.encode()).hexdigest() == stated


def test_subjects_are_the_files_by_sha256(built: Workshop) -> None:
    listed = {subject["name"]: subject["digest"]["sha256"] for subject in built.record("data")["subject"]}
    content = (built.root / "build" / "toy" / "data" / "rows" / "a.txt").read_bytes()
    assert listed == {"rows/a.txt": hashlib.sha256(content).hexdigest()}


def test_what_a_stage_takes_is_what_upstream_recorded(built: Workshop) -> None:
    dependencies = built.record("pack")["predicate"]["buildDefinition"]["resolvedDependencies"]
    inputs = [one for one in dependencies if one["name"].startswith("inputs/")]
    assert [one["name"] for one in inputs] == ["inputs/distill/drafter.txt"]
    assert inputs[0]["digest"] == built.record("distill")["subject"][0]["digest"]


def test_the_run_tells_how_and_not_where(built: Workshop) -> None:
    text = canonical_json(built.record("distill")).decode()
    run = built.record("distill")["predicate"]["runDetails"]["metadata"]["draftmill_run"]
    assert run["metrics"] == {"resumed_at": 0}
    assert run["threads"] == 1
    assert run["peak_rss_bytes"] > 1_000_000
    assert run["locked"] is False  # the toy lock pins a pydantic that is not installed
    assert run["unlocked"]["pydantic"][0] == "0.0.1"
    assert str(built.root) not in text


def test_a_damaged_record_is_no_record(built: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "toy" / "data.json"
    path.parent.mkdir(parents=True)
    whole = built.record("data")
    for text in ("", "[]", "{}", '{"_type": 1}', json.dumps({**whole, "subject": [1]}), "\xff"):
        path.write_text(text, encoding="latin-1")
        assert read_record(tmp_path, "toy", "data") is None
    path.write_text(json.dumps(whole))
    assert read_record(tmp_path, "toy", "data") == whole


def test_verify_names_each_file_that_differs(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    assert "make all" in shop.run(module="verify", code=2)
    shop.run("all")
    assert shop.run(module="verify").count("as recorded") == 4
    shop.write("output/model.txt", "other")
    (shop.root / "build/toy/data/rows/a.txt").unlink()
    shop.write("build/toy/distill/stray.txt", "stray")
    shop.replace("logs/toy/fetch.json", '"seed": 0', '"seed": 1')
    said = shop.run(module="verify", code=1)
    for sentence in ("output/model.txt differs from its record", "build/toy/data/rows/a.txt is missing",
                     "build/toy/distill/stray.txt is in no record",
                     "logs/toy/fetch.json: its key does not follow from its definition"):
        assert sentence in said


def test_verify_sees_a_record_made_from_other_inputs(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.run("all")
    shop.replace("stages/grain.py", "2", "3")
    shop.run("distill")
    assert "pack was made from another distill/drafter.txt" in shop.run(module="verify", code=1)
