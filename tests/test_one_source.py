"""Changing one source does that source again and what follows, and nothing else; the record says so."""

import hashlib
from pathlib import Path

import pytest
from mill import Mill

from stages.wrapper.record import definition_of

TALKS = """[[data.sources]]
id = "talks"
kind = "package"
source = "other"
category = "chat"
rows = 5
columns = { messages = "conversations" }
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    mill = Mill.make(tmp_path_factory.mktemp("mill") / "first")
    mill.run("fetch")
    mill.run("data")
    return mill


@pytest.fixture
def copy(first: Mill, tmp_path: Path) -> Mill:
    return first.copy(tmp_path / "copy")


def rows_of(mill: Mill, source: str) -> set[bytes]:
    lines = [line for name in ("train", "heldout")
             for line in mill.files("data")[f"{name}.jsonl"].splitlines()]
    return {line for line in lines if f'"source": "{source}"'.encode() in line}


def changed(one: Mill, other: Mill) -> dict[str, set[str]]:
    """What the records of two runs tell apart of each source."""
    ours, theirs = (mill.metrics("data")["sources"] for mill in (one, other))
    found = {name: {key for key in ("key", "prompts_sha256") if ours[name][key] != theirs[name][key]}
             for name in ours}
    return {name: keys for name, keys in found.items() if keys}


def test_a_source_that_the_profile_does_not_use_is_no_reason_to_run(first: Mill, copy: Mill) -> None:
    lock = (copy.root / "lock" / "sources.toml").read_text()
    copy.write("lock/sources.toml", lock + lock.replace("[toy]", "[other]").replace("Apache-2.0", "MIT"))
    for stage in ("fetch", "data"):
        assert copy.run(stage).splitlines()[-1] == f"{stage}: up to date"
    copy.replace("lock/sources.toml", "Apache-2.0", "BSD-3-Clause")
    for stage in ("fetch", "data"):
        assert f"{stage}: runs, because files lock/sources.toml#toy changed" in copy.run(stage)
    assert changed(first, copy) == {"invented": {"key"}}  # whose licence it is; the rows are the same


def test_changing_the_templates_leaves_what_the_target_invented(first: Mill, copy: Mill) -> None:
    sampled = first.metrics("data")["sources"]["invented"]
    assert sampled["batches_kept"] == 0 < sampled["batches_sampled"]
    copy.replace("profiles/toy.toml", "rows = 28", "rows = 20")
    said = copy.run("data")
    assert "data: runs, because config.data.sources" in said
    assert copy.run("fetch").splitlines()[-1] == "fetch: up to date"
    again = copy.metrics("data")["sources"]["invented"]
    assert again == sampled | {"batches_kept": sampled["batches_sampled"], "batches_sampled": 0}
    assert changed(first, copy) == {"templates": {"key", "prompts_sha256"}}
    assert len(rows_of(copy, "templates")) < len(rows_of(first, "templates"))
    assert rows_of(copy, "invented") == rows_of(first, "invented")


def test_changing_what_the_target_invents_leaves_the_templates(first: Mill, copy: Mill) -> None:
    copy.replace("profiles/toy.toml", "max_turn_tokens = 48", "max_turn_tokens = 40")
    copy.run("data")
    assert copy.metrics("data")["sources"]["invented"]["batches_kept"] == 0
    assert changed(first, copy) == {"invented": {"key", "prompts_sha256"}}
    assert rows_of(copy, "templates") == rows_of(first, "templates")
    assert rows_of(copy, "invented") != rows_of(first, "invented")


def test_what_was_kept_for_a_source_that_is_gone_goes(copy: Mill) -> None:
    kept = copy.root / "build" / "toy" / ".work" / "data.kept"
    assert [path.name for path in kept.iterdir()] == ["invented"]
    copy.replace("profiles/toy.toml", 'id = "invented"', 'id = "made-up"')
    copy.run("data")
    assert [path.name for path in kept.iterdir()] == ["made-up"]


def test_a_source_that_is_added_fetches_itself_alone(copy: Mill) -> None:
    digest = "ab" * 32
    table = ('\n[other]\nkind = "package"\nuri = "pkg:pypi/other@1.0"\nlicence = "MIT"\n'
             f'archive = {{ path = "other-1.0-py3-none-any.whl", size = 1, sha256 = "{digest}" }}\n'
             'files = [{ path = "small.yml", member = "other/small.yml", size = %d, sha256 = "%s" }]\n')
    text = "conversations:\n- - Where do storks spend the winter, and why do they leave?\n  - In Africa.\n"
    copy.write("vendor/other/small.yml", text)
    copy.write("lock/sources.toml", (copy.root / "lock/sources.toml").read_text() + table % (
        len(text), hashlib.sha256(text.encode()).hexdigest()))
    copy.replace("profiles/toy.toml", 'sources = ["toy"]', 'sources = ["toy", "other"]')
    copy.replace("profiles/toy.toml", "[teacher]", TALKS + "[teacher]")
    copy.run("fetch")
    copy.run("data")
    subjects = {one["name"] for one in copy.record("fetch")["subject"]}
    assert {"other/small.yml", "toy/toy.gguf"} <= subjects
    assert copy.metrics("fetch")["brought_bytes"] == 0
    for stage, others in (("fetch", {"lock/serve.txt"}), ("data", set())):
        read = {name for name in definition_of(copy.record(stage))["files"] if name.startswith("lock/")}
        assert read == {"lock/sources.toml#toy", "lock/sources.toml#other"} | others
    assert copy.metrics("data")["sources"]["invented"]["batches_sampled"] == 0
    assert len(rows_of(copy, "talks")) == 1
