"""Fetched data sets: columns, splits, and the refusal of everything that is for evaluation."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from sources import make_job, source, turns

from stages.errors import UserError
from stages.sources import Context, Rejected, Row, hub

CHATS = [{"messages": list(turns(f"Question {i}?", f"Answer {i}.", f"More of {i}?")), "topic": "stem"}
         for i in range(20)]


def read(root: Path, **more: Any) -> list[Row | Rejected]:
    one = source("chats", kind="hub", **({"source": "chats", "category": "writing"} | more))
    return list(hub.rows(one, Context(make_job(root, [one]), tokenizer=None)))  # type: ignore[arg-type]


def put(root: Path, name: str, records: list[dict[str, Any]]) -> Path:
    path = root / "vendor" / "chats" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", ["data/train-00000-of-00001.parquet", "train.jsonl"])
def test_messages_of_either_format(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, CHATS)
    rows = read(tmp_path, columns={"messages": "messages"})
    assert sorted(row.messages[0]["content"] for row in rows) == sorted(f"Question {i}?" for i in range(20))
    assert all(row.messages[-1]["role"] == "user" and len(row.messages) == 3 for row in rows)
    assert rows == read(tmp_path, columns={"messages": "messages"})
    assert len({row.family for row in rows}) == 20


def test_prompt_category_family_and_language_columns(tmp_path: Path) -> None:
    put(tmp_path, "all.jsonl", [{"q": "Why?", "field": "stem", "book": "b1", "lang": "pt"}])
    columns = {"prompt": "q", "category": "field", "family": "book", "language": "lang"}
    assert read(tmp_path, columns=columns) == [Row("chats/b1", "stem", turns("Why?"), "pt")]


def test_an_empty_cell_is_no_text(tmp_path: Path) -> None:
    put(tmp_path, "all.jsonl", [{"q": "Why?", "field": None, "book": None, "lang": None}])
    columns = {"prompt": "q", "category": "field", "family": "book", "language": "lang"}
    assert read(tmp_path, columns=columns) == [Row("chats/0", "writing", turns("Why?"), "und")]
    assert read(tmp_path, columns=columns, category=None) == [Rejected("no category")]


def test_languages_have_one_kind_of_name(tmp_path: Path) -> None:
    codes = {"deu": "de", "de": "de", "spa_Latn": "es", "pt-BR": "pt", "zho": "zh", "ceb": "ceb"}
    put(tmp_path, "all.jsonl", [{"q": "Why?", "lang": name} for name in codes])
    rows = read(tmp_path, columns={"prompt": "q", "language": "lang"})
    assert sorted(row.language for row in rows if isinstance(row, Row)) == sorted(codes.values())


@pytest.mark.parametrize("cell", ["Why?", 7, {"role": "user"}])
def test_a_cell_that_holds_no_turns_is_no_conversation(tmp_path: Path, cell: Any) -> None:
    put(tmp_path, "all.jsonl", [{"m": cell}])
    assert read(tmp_path, columns={"messages": "m"}) == [Rejected("not a conversation")]


def test_turns_are_kept_as_far_as_they_alternate(tmp_path: Path) -> None:
    def say(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    put(tmp_path, "train.jsonl", [
        {"m": [say("system", "Be kind."), say("user", "a"), say("assistant", "b")]},
        {"m": [say("user", "c"), say("user", "d")]},
        {"m": [say("assistant", "e"), say("user", "f")]},
    ])
    rows = read(tmp_path, columns={"messages": "m"})
    assert [row for row in rows if isinstance(row, Rejected)] == [Rejected("not a conversation")]
    kept = sorted((row.messages for row in rows if isinstance(row, Row)), key=str)
    assert kept == [turns("a"), turns("c")]


@pytest.mark.parametrize("name", [
    "test.jsonl", "data/validation-0.parquet", "dev/part.jsonl", "eval_set.jsonl", "train_benchmark.jsonl",
])
def test_a_file_for_evaluation_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, "train.jsonl", CHATS)
    put(tmp_path, name, CHATS)
    with pytest.raises(UserError, match="for evaluation"):
        read(tmp_path, columns={"messages": "messages"})


@pytest.mark.parametrize("split", ["test", "validation", "dev", "test_sft", "eval"])
def test_a_split_for_evaluation_is_refused(tmp_path: Path, split: str) -> None:
    put(tmp_path, "train.jsonl", CHATS)
    with pytest.raises(UserError, match=f"'{split}' says"):
        read(tmp_path, split=split, columns={"messages": "messages"})


def test_words_that_only_contain_a_forbidden_one_are_fine(tmp_path: Path) -> None:
    put(tmp_path, "latest-devices-decontaminated.jsonl", CHATS)
    assert len(read(tmp_path, columns={"messages": "messages"})) == 20


def test_only_the_named_split_is_read(tmp_path: Path) -> None:
    put(tmp_path, "data/train_sft-0.jsonl", CHATS[:3])
    put(tmp_path, "data/train_gen-0.jsonl", CHATS[3:])
    assert len(read(tmp_path, split="train_sft", columns={"messages": "messages"})) == 3


@pytest.mark.parametrize(("more", "complaint"), [
    ({"columns": {}}, "needs one of messages and prompt"),
    ({"columns": {"prompt": "q", "answer": "a"}}, "columns has no 'answer'; it takes messages, prompt"),
    ({"columns": {"prompt": "nothing"}}, "no column 'nothing'; there are messages, topic"),
    ({"columns": {"prompt": "topic"}, "category": None}, "needs a category"),
    ({"columns": {"prompt": "topic"}, "source": "elsewhere"}, "no source 'elsewhere'; it has chats"),
    ({"columns": {"prompt": "topic"}, "split": "train_sft"}, "of split 'train_sft'; found train.jsonl"),
])
def test_a_mistake_in_the_profile_is_a_sentence(tmp_path: Path, more: Any, complaint: str) -> None:
    put(tmp_path, "train.jsonl", CHATS)
    with pytest.raises(UserError, match=complaint):
        read(tmp_path, **more)


def test_the_manifest_gets_uri_revision_and_file_hashes(tmp_path: Path) -> None:
    put(tmp_path, "train.jsonl", CHATS)
    one = source("chats", kind="hub", source="chats", category="writing", columns={"prompt": "topic"})
    origin = hub.origin(one, Context(make_job(tmp_path, [one]), tokenizer=None))  # type: ignore[arg-type]
    assert origin["revision"] == "0123456789012345678901234567890123456789"
    assert (origin["licence"], origin["split"]) == ("MIT", "train")
    assert [len(digest) for digest in origin["files"].values()] == [64]
