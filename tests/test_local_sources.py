"""Files of the user's own and corpora in wheels: by hash, mapped to rows, refused where they only judge."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from sources import make_job, source, turns

from stages.errors import UserError
from stages.files import sha256_file
from stages.sources import Context, Row, load_kind

RECORDS = [{"q": f"What is {i}?", "about": "math"} for i in range(6)]
TALKS = """categories: [small]
conversations:
- - Hello
  - Hi
  - How are you?
- - 5
  - yes
"""


def context_of(root: Path, one: Any) -> Context:
    return Context(make_job(root, [one]), tokenizer=None)  # type: ignore[arg-type]


def write(root: Path, name: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def local(root: Path, name: str, kind: str, **more: Any) -> Any:
    path = root / name
    digest = sha256_file(path) if path.is_file() else "0" * 64
    return source("mine", kind=kind, **({
        "files": ({"path": name, "sha256": digest},), "uri": "https://example.org/mine", "licence": "CC0-1.0",
        "columns": {"prompt": "q", "category": "about"}} | more))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_local_files_by_hash(tmp_path: Path, kind: str) -> None:
    write(tmp_path, f"mine/train.{kind}")
    one = local(tmp_path, f"mine/train.{kind}", kind)
    rows = list(load_kind(kind).rows(one, context_of(tmp_path, one)))
    assert all(isinstance(row, Row) for row in rows)
    assert sorted(row.messages[0]["content"] for row in rows) == [record["q"] for record in RECORDS]
    assert {(row.category, row.family.split("/")[0]) for row in rows} == {("math", "mine")}
    assert rows == list(load_kind(kind).rows(one, context_of(tmp_path, one)))
    origin = load_kind(kind).origin(one, context_of(tmp_path, one))
    assert (origin["uri"], origin["licence"]) == ("https://example.org/mine", "CC0-1.0")
    assert origin["files"] == {f"mine/train.{kind}": one.files[0].sha256}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_folder_whose_name_looks_like_a_pattern_is_a_folder(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "my [v2] of 1*?"
    root.mkdir()
    write(root, f"mine/train.{kind}")
    one = local(root, f"mine/train.{kind}", kind)
    assert len(list(load_kind(kind).rows(one, context_of(root, one)))) == len(RECORDS)


@pytest.mark.parametrize(("name", "kind", "spoil", "complaint"), [
    ("mine.jsonl", "jsonl", lambda path: path.unlink(), "mine.jsonl is missing"),
    ("mine.jsonl", "jsonl", lambda path: path.write_text("{}"), "mine.jsonl has sha256 .*the profile pins"),
    ("mine.jsonl", "parquet", lambda path: None, "mine.jsonl is no .parquet file"),
    ("my_test.jsonl", "jsonl", lambda path: None, "'my_test.jsonl' says 'test'"),
    ("eval/mine.jsonl", "jsonl", lambda path: None, "says 'eval'"),
])
def test_another_file_is_refused(tmp_path: Path, name: str, kind: str, spoil: Any, complaint: str) -> None:
    path = write(tmp_path, name)
    one = local(tmp_path, name, kind)
    spoil(path)
    with pytest.raises(UserError, match=complaint):
        list(load_kind(kind).rows(one, context_of(tmp_path, one)))


@pytest.mark.parametrize(("kind", "content"), [
    ("jsonl", b'{"q": "x", "about": "math"}\n{"q": \n'), ("jsonl", b""), ("jsonl", b"1\n2\n"),
    ("parquet", b"PAR1" + bytes(40) + b"PAR1"), ("parquet", b""),
])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / f"mine.{kind}").write_bytes(content)
    one = local(tmp_path, f"mine.{kind}", kind)
    with pytest.raises(UserError, match=rf"'mine': cannot read mine.{kind}: \S"):
        list(load_kind(kind).rows(one, context_of(tmp_path, one)))


@pytest.mark.parametrize("more", [
    {"kind": "jsonl"}, {"kind": "parquet", "uri": "x", "licence": "MIT"}, {"kind": "package"},
    {"kind": "template", "licence": "MIT"}, {"kind": "jsonl", "source": "chats"},
    {"kind": "jsonl", "uri": "x", "licence": "MIT", "files": ({"path": "/etc/x.jsonl", "sha256": "0" * 64},)},
    {"kind": "jsonl", "uri": "x", "licence": "MIT", "files": ({"path": "../x.jsonl", "sha256": "0" * 64},)},
])
def test_a_source_has_the_keys_of_its_kind(more: Any) -> None:
    with pytest.raises(ValidationError, match=r"need|relative"):
        source("mine", **more)


def package(root: Path, name: str = "small.yml", text: str = TALKS) -> tuple[Any, Context]:
    path = root / "vendor" / "talks" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    one = source("talks", kind="package", source="talks", category="chat",
                 columns={"messages": "conversations"})
    return one, context_of(root, one)


def test_a_corpus_in_a_wheel_is_read_as_talks(tmp_path: Path) -> None:
    one, context = package(tmp_path)
    rows = list(load_kind("package").rows(one, context))
    said = sorted((row.messages for row in rows if isinstance(row, Row)), key=str)
    assert said == [turns("5"), turns("Hello", "Hi", "How are you?")]
    origin = load_kind("package").origin(one, context)
    assert (origin["uri"], origin["licence"]) == ("pkg:pypi/talks@2.0", "BSD-3-Clause")
    assert origin["command"] == "pip download --no-deps talks==2.0"
    assert list(origin["files"]) == ["small.yml"]


@pytest.mark.parametrize("text", ["categories: [a]", ":\n - [", "7"])
def test_a_file_without_talks_is_a_sentence(tmp_path: Path, text: str) -> None:
    one, context = package(tmp_path, text=text)
    with pytest.raises(UserError, match="no YAML with a list 'conversations'"):
        list(load_kind("package").rows(one, context))


def test_a_source_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    one = source("chats", kind="package", source="chats", category="chat", columns={"prompt": "q"})
    with pytest.raises(UserError, match=r"chats is of kind 'hub' in lock/sources\.toml, not 'package'"):
        list(load_kind("package").rows(one, context_of(tmp_path, one)))
