"""lock/sources.toml: its schema, its sentences, and the hashes that the hub gives."""

import re
from pathlib import Path

import pytest
from upstreams import COMMIT, sha256, upstream

from stages.errors import UserError
from stages.upstream import hub, relock
from stages.upstream.pinned import find, read_sources
from stages.upstream.relock import lock_source

ROOT = Path(__file__).resolve().parent.parent
HUB = {
    "kind": '"hub"',
    "uri": f'"hf://datasets/o/n@{COMMIT}"',
    "licence": '"MIT"',
    "allow": '["data/train-*"]',
}
PACKAGE = {
    "kind": '"package"',
    "uri": '"pkg:pypi/some-thing@1.2.post1"',
    "licence": '"Apache-2.0 OR MIT"',
    "archive": f'{{ path = "a.whl", size = 1, sha256 = "{"a" * 64}" }}',
    "files": f'[{{ path = "a.gguf", member = "x/a.gguf", size = 1, sha256 = "{"b" * 64}" }}]',
}


def write(path: Path, table: dict[str, str]) -> Path:
    path.write_text("[one]\n" + "".join(f"{key} = {value}\n" for key, value in table.items()))
    return path


def test_every_real_source_is_sound_and_pinned():
    sources = read_sources(ROOT / "lock/sources.toml")
    assert sources["smollm2-135m-instruct"].files[0].size == 98_362_432
    assert sources["qwen3-8b"].revision == "b968826d9c46dd6066d109eabc6255188de91218"
    assert (sources["gsm8k"].repo_type, sources["gsm8k"].name) == ("dataset", "openai/gsm8k")
    with pytest.raises(UserError, match="no source 'qwen3-9b'; it has aya, chatterbot"):
        find(sources, "qwen3-9b")


def test_well_formed_entries_are_read(tmp_path: Path):
    package = read_sources(write(tmp_path / "s", PACKAGE))["one"]
    assert (package.name, package.revision, package.wheel.path) == ("some-thing", "1.2.post1", "a.whl")
    assert read_sources(write(tmp_path / "s", HUB))["one"].files == ()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (HUB | {"uri": '"hf://models/o/n@main"'}, "must be a commit of 40 hexadecimal digits .found 'main'"),
        (HUB | {"uri": f'"hf://models/o/n@{COMMIT[:39]}"'}, "must be a commit of 40"),
        (HUB | {"uri": f'"https://example.org/o/n@{COMMIT}"'}, "uri must be hf://"),
        (HUB | {"allow": '["data/validation-*"]'}, "a test or validation split"),
        (HUB | {"allow": '["test.jsonl"]'}, "a test or validation split"),
        (HUB | {"allow": "[]"}, "a hub source needs allow"),
        (HUB | {"licence": '"see the card"'}, "one.licence: must be an SPDX expression"),
        (HUB | {"licence": '""'}, "one.licence: must be an SPDX expression"),
        (HUB | {"uri": f'"hf://models/cais/mmlu@{COMMIT}"'}, "mmlu is an evaluation set"),
        (HUB | {"uri": f'"hf://models/o/n@{COMMIT}"', "split": '"train"'}, "a model has no split"),
        (HUB | {"revison": '"x"'}, "one.revison: unknown key. Allowed in a source: allow, archive"),
        (HUB | {"kind": '"git"'}, "one.kind: Input should be 'package' or 'hub'"),
        (PACKAGE | {"uri": '"pkg:pypi/some-thing"'}, "uri must be pkg:pypi/NAME@VERSION"),
        ({key: PACKAGE[key] for key in ("kind", "uri", "licence")}, "a package needs archive and files"),
        (PACKAGE | {"files": PACKAGE["files"].replace("a.gguf", "../a.gguf", 1)}, "plain relative path"),
        (PACKAGE | {"files": PACKAGE["files"].replace('"a.gguf"', '"/etc/x"')}, "plain relative path"),
        (PACKAGE | {"files": PACKAGE["files"].replace("b" * 64, "B" * 64)}, "one.files.0.sha256"),
        (PACKAGE | {"files": PACKAGE["files"].replace("size = 1", 'size = "1"')}, "one.files.0.size"),
    ],
)
def test_a_faulty_entry_is_a_sentence_that_names_it(tmp_path: Path, table: dict[str, str], sentence: str):
    with pytest.raises(UserError, match=sentence) as refusal:
        read_sources(write(tmp_path / "s", table))
    assert "lock/sources.toml: one" in str(refusal.value)


@pytest.mark.parametrize("name", [
    "cais/mmlu", "openai/openai_humaneval", "TIGER-Lab/MMLU-Pro", "Idavidrein/gpqa", "HuggingFaceH4/MATH-500",
    "tatsu-lab/alpaca_eval", "google/IFEval", "lmsys/mt_bench_human_judgments", "truthfulqa/truthful_qa",
    "someone/mmlu_by_subject", "someone/my-benchmark", "someone/chats_test", "someone/dev-set",
])  # fmt: skip
def test_an_evaluation_set_is_refused_by_its_repository(tmp_path: Path, name: str):
    table = HUB | {"uri": f'"hf://datasets/{name}@{COMMIT}"', "allow": '["data/train-*"]'}
    with pytest.raises(UserError, match=r"evaluation set|says '(benchmark|test|dev)'"):
        read_sources(write(tmp_path / "s", table))


@pytest.mark.parametrize("name", ["openai/gsm8k", "a/latest-devices", "a/contests", "HuggingFaceTB/smoltalk"])
def test_a_training_set_is_not_mistaken_for_one(tmp_path: Path, name: str):
    table = HUB | {"uri": f'"hf://datasets/{name}@{COMMIT}"', "allow": '["data/train-*"]'}
    assert read_sources(write(tmp_path / "s", table))["one"].name == name


@pytest.mark.parametrize("split", ["test", "validation", "dev_sft", "eval"])
def test_a_split_that_only_judges_is_refused(tmp_path: Path, split: str):
    table = HUB | {"uri": f'"hf://datasets/o/n@{COMMIT}"', "allow": '["data/train-*"]', "split": f'"{split}"'}
    with pytest.raises(UserError, match="a test or validation split, which nothing here may use"):
        read_sources(write(tmp_path / "s", table))


def test_a_file_that_is_no_toml_or_not_there_is_a_sentence(tmp_path: Path):
    (tmp_path / "s").write_text("[one\n")
    with pytest.raises(UserError, match=r"lock/sources.toml: not TOML"):
        read_sources(tmp_path / "s")
    with pytest.raises(UserError, match=r"lock/sources.toml is missing"):
        read_sources(tmp_path / "t")


def test_the_command_ends_with_2_and_a_sentence(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(relock, "ROOT", tmp_path)
    assert relock.main(["qwen3-8b"]) == 2
    assert capsys.readouterr().err == "draftmill: lock/sources.toml is missing\n"


FILES = {
    "data/train-0.parquet": b"large" * 1000,
    "data/train-1.parquet": b"small",
    "data/test-0.parquet": b"no",
}
TEXT = f"""# Kept.

[one]
kind = "hub"
uri = "hf://datasets/o/n@{COMMIT}"
licence = "MIT"
allow = ["data/train-*"]

# Kept too.
["one.5"]
kind = "hub"
uri = "hf://models/o/n@{COMMIT}"
licence = "MIT"
allow = ["data/*-0.parquet"]
"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch):
    with upstream() as one:
        one.files = dict(FILES)
        monkeypatch.setenv("HF_ENDPOINT", one.address)
        monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.0)
        yield one


def test_the_hub_gives_the_hashes_and_the_rest_of_the_file_stays(tmp_path: Path, held):
    path = tmp_path / "sources.toml"
    path.write_text(TEXT)
    held.orders["api"] = ["503:0"]
    assert lock_source(path, "one") == "one: 2 files, 5,005 bytes"
    assert lock_source(path, "one.5").startswith("one.5: 2 files")
    once = path.read_text()
    assert lock_source(path, "one").startswith("one: 2 files")
    assert path.read_text() == once
    sources = read_sources(path)
    assert [(file.path, file.size, file.sha256) for file in sources["one"].files] == [
        (name, len(FILES[name]), sha256(FILES[name]))
        for name in ("data/train-0.parquet", "data/train-1.parquet")
    ]
    assert [file.path for file in sources["one.5"].files] == ["data/test-0.parquet", "data/train-0.parquet"]
    assert held.transfers("train-0.parquet") == []  # a large file's hash is the hub's word, checked by fetch
    assert re.sub(r"files = \[\n(  .*\n)*\]\n", "", once) == TEXT


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("other", "no source 'other'"),
        ("one", r"allow has 'data/train-\*', which matches no file"),
        ("one.5", "answers for commit ffff"),
        ("two", r"two: 'data/test-0.parquet' says 'test': a test or validation split"),
    ],
)
def test_what_cannot_be_locked_is_refused(tmp_path: Path, held, name: str, sentence: str):
    path = tmp_path / "sources.toml"
    # The pattern says nothing of a test, and a file that it lets through does.
    text = TEXT + TEXT[TEXT.index('["one.5"]') :].replace('"one.5"', "two").replace("models", "datasets")
    path.write_text(text)
    held.files = {"README.md": b"x"} if name != "two" else FILES
    held.commit = "f" * 40 if name == "one.5" else COMMIT
    with pytest.raises(UserError, match=sentence):
        lock_source(path, name)
    assert path.read_text() == text
