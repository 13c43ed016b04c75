"""What is for evaluation is refused by its name, whichever way it is named; and a licence is one."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sources import make_job, source

from stages.errors import UserError
from stages.sources import Context, load_kind
from stages.upstream.evaluations import evaluation_at, telling_word

MINE = {"files": ({"path": "mine.jsonl", "sha256": "0" * 64},), "uri": "https://example.org/mine",
        "licence": "CC0-1.0"}


@pytest.mark.parametrize("name", [
    "test", "tests", "testing", "valid", "validation", "val", "vals", "dev", "devs", "development", "eval",
    "evals", "evaluation", "evaluations", "bench", "benchmark", "benchmarks", "benchmarking", "heldout",
    "holdout", "held_out", "held-out", "hold_out", "HeldOut", "testset", "testdata", "testmini", "devtest",
    "devset", "testsplit", "evalset", "valset", "validset", "trainval", "minival", "TestSet", "TestSplit",
    "trainTest", "MTBench", "TESTSet", "data/test-00000-of-1.parquet", "main/dev.json", "train_val2017",
    "train-test",
])  # fmt: skip
def test_a_name_that_says_evaluation_is_known_by_its_word(name: str) -> None:
    assert telling_word(name)


@pytest.mark.parametrize("name", [
    "train_sft", "trainset", "minimal", "latest", "contests", "devices", "DevOps", "dev-ops", "developers",
    "validated", "interval", "retrieval", "medieval", "households", "threshold", "dataset", "unittests",
])  # fmt: skip
def test_a_name_that_only_contains_such_a_word_is_not(name: str) -> None:
    assert telling_word(name) is None


@pytest.mark.parametrize(("uri", "told"), [
    ("hf://datasets/cais/mmlu@main", "cais/mmlu"), ("hf://cais/mmlu", "cais/mmlu"),
    ("https://huggingface.co/datasets/openai/openai_humaneval/tree/main", "openai/openai_humaneval"),
    ("hf://datasets/o/n@main/data/test-0.parquet", "test"), ("https://example.org/a/dev.jsonl", "dev"),
    ("hf://datasets/test-lab/chats@main", None), ("https://dev.example.org/tests/chats.jsonl", None),
    ("my own", None),
])  # fmt: skip
def test_a_uri_of_what_judges_is_known(uri: str, told: str | None) -> None:
    assert evaluation_at(uri) == told


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("more", "sentence"), [
    ({"uri": "hf://datasets/cais/mmlu@main"}, "'hf://datasets/cais/mmlu@main' says 'cais/mmlu', which is"),
    ({"uri": "https://example.org/test.jsonl"}, "says 'test', which is for evaluation"),
    ({"uri": ""}, "at least 1 character"),
    ({"licence": ""}, "must be an SPDX expression"),
    ({"licence": "see the card"}, "must be an SPDX expression, such as MIT or LicenseRef-own .found 'see"),
])  # fmt: skip
def test_files_of_the_users_own_are_held_to_the_same(kind: str, more: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        source("mine", kind=kind, **(MINE | more))
    assert source("mine", kind=kind, **(MINE | {"licence": "LicenseRef-own OR MIT"}))


@pytest.mark.parametrize(("split", "uri", "sentence"), [
    ("train_gen", "hf://datasets", ""),
    ("train_sft", "hf://datasets", r"split is 'train_sft', and lock/sources\.toml fetches 'train_gen' of"),
    ("train_gen", "hf://models", "chats is a model, and no set of data"),
])
def test_the_profile_takes_no_other_split_than_the_lock_and_no_model(
        tmp_path: Path, split: str, uri: str, sentence: str) -> None:
    one = source("chats", kind="hub", source="chats", category="chat", split=split, columns={"prompt": "q"})
    context = Context(make_job(tmp_path, [one]), tokenizer=None)  # type: ignore[arg-type]
    (tmp_path / "vendor" / "chats").mkdir(parents=True)
    for name in ("train_gen", "train_sft"):
        (tmp_path / "vendor" / "chats" / f"{name}.jsonl").write_text('{"q": "Why?"}\n')
    lock = tmp_path / "lock" / "sources.toml"
    lock.write_text(lock.read_text().replace("hf://datasets", uri).replace(
        'licence = "MIT"', 'licence = "MIT"' + ('\nsplit = "train_gen"' if "datasets" in uri else "")))
    with pytest.raises(UserError, match=f"'chats': {sentence}") if sentence else nullcontext():
        assert len(list(load_kind("hub").rows(one, context))) == 1
