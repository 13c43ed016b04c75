"""The contest's data path at toy size: real hub clients, data sets in their files, Qwen3's own template."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mill import FILES, FOLDERS, ROOT
from tiny_hub import tiny_hub
from transformers import AutoTokenizer
from upstreams import COMMIT, Upstream

from stages.files import sha256_file
from stages.profile import load_profile
from stages.upstream.pinned import read_sources

SOURCES = ("tiny-ultrachat-200k", "tiny-gsm8k", "tiny-coedit", "tiny-magicoder", "tiny-aya")


@pytest.fixture(scope="module")
def hub() -> Iterator[Upstream]:
    with tiny_hub(ROOT / "build" / "tiny-hub") as held:
        yield held


@pytest.fixture(scope="module")
def made(hub: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository in which fetch and data have run; the hub was busy and broke off once."""
    root = tmp_path_factory.mktemp("tiny") / "draftmill"
    for name in (*FOLDERS, "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, root)
    (root / "lock" / "serve.txt").write_text("")  # the grader's wheels have tests of their own
    hub.orders["data/train_sft-00000-of-00001.parquet"] = ["429:0"]
    hub.orders["model-00001-of-00002.safetensors"] = ["cut"]
    environment = {**os.environ, "PROFILE": "qwen3-tiny", "RUNNER": "host", "OMP_NUM_THREADS": "1",
                   "HF_ENDPOINT": hub.address}
    for stage in ("fetch", "data"):
        run = subprocess.run([sys.executable, "-m", "stages.run", stage], cwd=root, env=environment,
                             check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert run.returncode == 0, run.stdout
    return root


def read(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "build/qwen3-tiny/data" / name).read_text().splitlines()]


def manifest(root: Path) -> dict[str, Any]:
    return json.loads((root / "build/qwen3-tiny/data/data_manifest.json").read_text())


def test_prompt_ids_are_those_of_transformers_template(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "vendor" / "tiny-qwen3-8b")
    for name in ("examples", "dev"):
        rows = {row["id"]: row["prompt"] for row in read(made, f"{name}.jsonl")}
        asked = [json.loads(line) for line in (ROOT / f"examples/{name}.jsonl").read_text().splitlines()]
        assert len(rows) == len(asked) > 30
        for one in asked:
            ids = tokenizer.apply_chat_template(one["messages"], add_generation_prompt=True, tokenize=True,
                                                enable_thinking=False)
            assert rows[one["id"]] == ids
            assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_earlier_turns_carry_no_think_block(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "vendor" / "tiny-qwen3-8b")
    texts = [tokenizer.decode(row["prompt"]) for row in read(made, "train.jsonl") if row["source"] == "chat"]
    later = [text for text in texts if text.count("<|im_start|>assistant") == 2]
    assert later
    assert all(text.count("<think>") == 1 for text in texts)


def test_the_manifest_names_every_source(made: Path) -> None:
    entries = {entry["id"]: entry for entry in manifest(made)["sources"]}
    assert list(entries) == [
        "chat", "school-math", "editing", "code", "many-languages", "templates", "invented"]
    pinned = read_sources(made / "lock/sources.toml")
    for entry, name in zip(list(entries.values())[:5], SOURCES, strict=True):
        assert entry["uri"] == pinned[name].uri
        assert (entry["revision"], entry["licence"]) == (COMMIT, "Apache-2.0")
        assert entry["split"] == pinned[name].split
        assert entry["files"] == {file.path: file.sha256 for file in pinned[name].files}
        command = f"hf download draftmill/{name} --repo-type dataset --revision {COMMIT}"
        assert entry["command"].startswith(command)
        assert entry["log"] == "evidence/logs/downloads.jsonl"
    for entry in entries.values():
        assert entry["licence"] == "Apache-2.0"
        assert entry["files"]
        assert entry["command"]
        assert entry["uri"]
        assert re.fullmatch(r"[0-9a-f]{40}|sha256:[0-9a-f]{64}", entry["revision"])
        assert entry["split"] in ("train", "train_sft")
        assert entry["log"].startswith("evidence/logs/")
        assert entry["prompts_kept"] == sum(entry["prompts_by_split"].values()) > 0
        assert entry["conversations_read"] >= entry["prompts_kept"] / 2
    assert entries["many-languages"]["prompts_by_language"].keys() == {"de", "es"}
    assert manifest(made)["target"]["uri"] == pinned["tiny-qwen3-8b"].uri


def test_planted_examples_are_caught_and_counted(made: Path) -> None:
    chat = next(entry for entry in manifest(made)["sources"] if entry["id"] == "chat")
    assert chat["conversations_dropped"]["shares words with examples"] == 2
    assert chat["conversations_dropped"]["resembles examples"] == 2


def test_only_training_files_are_fetched_and_the_log_tells_the_story(made: Path, hub: Upstream) -> None:
    fetched = {path.relative_to(made / "vendor").as_posix() for path in (made / "vendor").glob("tiny-*/**/*")
               if path.is_file()}
    pinned = read_sources(made / "lock/sources.toml")
    profile = load_profile("qwen3-tiny", made / "profiles")
    wanted = {f"{name}/{file.path}" for name in profile.fetch.sources for file in pinned[name].files}
    assert fetched == wanted
    asked = [path.rpartition("/")[2] for _, path, *_ in hub.asked]
    assert not any("test" in name or "validation" in name for name in asked)
    rows = [json.loads(line) for line in (made / "vendor/downloads.jsonl").read_text().splitlines()]
    assert {(row["uri"].rpartition("@")[0], row["sha256"]) for row in rows if row["status"] == "ok"} == {
        (pinned[name].uri.rpartition("@")[0], file.sha256)
        for name in profile.fetch.sources for file in pinned[name].files}
    failed = [row for row in rows if row["status"] == "failed"]
    assert [row.get("http_status") for row in failed] == [None, 429]
    assert failed[0]["reason"].startswith("the transfer ")
    assert str(hub.transfers("model-00001-of-00002.safetensors")[-1]).startswith("bytes=")
    for name in profile.fetch.sources:
        for file in pinned[name].files:
            assert sha256_file(made / "vendor" / name / file.path) == file.sha256


def test_it_differs_from_the_contest_job_in_sizes_and_endpoint_only() -> None:
    paths = [ROOT / "profiles" / f"{name}.toml" for name in ("qwen3-8b", "qwen3-tiny")]
    tables = [tomllib.loads(path.read_text()) for path in paths]
    contest, tiny = (table["data"]["sources"] for table in tables)
    for ours, theirs in zip(tiny, contest, strict=True):
        sizes = {"rows", "max_turn_tokens", "source"}
        assert {key: ours[key] for key in ours.keys() - sizes} == {
            key: theirs[key] for key in theirs.keys() - sizes}
        assert ours.get("source", "").removeprefix("tiny-") in theirs.get("source", "")
    whole, small = (load_profile(name, ROOT / "profiles").model_dump() for name in ("qwen3-8b", "qwen3-tiny"))
    differing = {(section, key) for section in whole if isinstance(whole[section], dict)
                 for key in whole[section] if whole[section][key] != small[section][key]}
    assert differing <= {
        ("limits", "limit_bytes"), ("limits", "reserve_bytes"), ("target", "source"), ("target", "name"),
        ("target", "revision"), ("fetch", "sources"), ("data", "sources"), ("data", "heldout_share"),
        ("teacher", "max_tokens"), ("teacher", "shard_rows"), ("start", "source"), ("start", "layers"),
        ("distill", "steps"), ("distill", "batch_tokens"), ("distill", "warmup_steps"),
        ("qat", "steps"), ("qat", "batch_tokens"), ("qat", "warmup_steps"),
    }
