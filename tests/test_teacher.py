"""The teacher's shards and sets: the target's greedy text as transformers writes it, in a fixed order."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mill import STOP, Mill, finished, target_model
from safetensors.torch import load_file
from trainers import make_job

from stages.errors import UserError
from stages.files import read_jsonl, write_jsonl
from stages.teacher import EVALUATION_SETS, tasks_of
from stages.training.rows import Row, read_rows
from stages.training.shards import read_tally

CAP, REPEAT, TOP_K, SHARD_ROWS = 24, 4, 4, 8


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.fixture(scope="module")
def rows(mill: Mill) -> list[Row]:
    return list(read_rows(mill.folder("teacher")))


@pytest.fixture(scope="module")
def prompts(mill: Mill) -> list[dict]:
    return list(read_jsonl(mill.folder("data") / "train.jsonl"))


def written_by_transformers(model, prompt: list[int]) -> list[int]:
    """Greedy text, cut before the first 4-gram that recurs in it."""
    given = torch.tensor([prompt])
    out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=CAP)
    tokens = out[0, len(prompt):].tolist()
    for end in range(REPEAT, len(tokens) + 1):
        earlier = [tokens[start : start + REPEAT] for start in range(end - REPEAT)]
        if tokens[end - REPEAT : end] in earlier:
            return tokens[: end - REPEAT]
    return tokens


def test_continuations_are_transformers_greedy_text(mill: Mill, rows: list[Row]) -> None:
    model = target_model()
    pairs = [(row.prompt.tolist(), row.continuation.tolist()) for row in rows[::4]]
    for name in ("dev", "examples", "heldout"):
        row = next(read_jsonl(mill.folder("teacher") / f"{name}.jsonl"))
        pairs.append((row["prompt"], row["continuation"]))
    for prompt, continuation in pairs:
        assert continuation == written_by_transformers(model, prompt)
    assert len({tuple(continuation) for _, continuation in pairs}) == len(pairs), "the text is constant"


def test_top_k_is_transformers_distribution_at_each_position(rows: list[Row]) -> None:
    model = target_model()
    for row in rows[1::9]:
        text = torch.cat((row.prompt, row.continuation[:-1]))[None]
        with torch.inference_mode():
            logprobs_tv = model(text).logits[0, len(row.prompt) - 1 :].log_softmax(-1)
        values_tk, ids_tk = logprobs_tv.topk(TOP_K)
        assert torch.equal(row.topk_ids, ids_tk.int())
        assert torch.equal(row.topk_ids[:, 0], row.continuation)
        stored_tk = row.topk_logprobs.float()  # in float16
        torch.testing.assert_close(stored_tk, values_tk, atol=4e-3, rtol=1e-3)


def test_a_continuation_ends_at_the_stop_id_the_cap_or_a_repeat(mill: Mill, rows: list[Row]) -> None:
    ended = {"stop": 0, "cap": 0, "repeat": 0}
    for row in rows:
        tokens = row.continuation.tolist()
        assert STOP not in tokens[:-1]
        assert 0 < len(tokens) <= CAP
        kind = "stop" if tokens[-1] == STOP else "cap" if len(tokens) == CAP else "repeat"
        ended[kind] += 1
    assert ended["stop"]
    assert ended["cap"]
    metrics = mill.metrics("teacher")
    assert metrics["stop_share"] == round(ended["stop"] / len(rows), 4)
    assert metrics["loop_share"] >= round(ended["repeat"] / len(rows), 4)
    assert (metrics["rows"], metrics["tokens"]) == (len(rows), sum(len(row.continuation) for row in rows))


def test_the_report_tells_categories_lengths_probabilities_and_speed(
        mill: Mill, rows: list[Row], prompts: list[dict]) -> None:
    metrics = mill.metrics("teacher")
    assert any(event.get("text", "").endswith(" a second") for event in mill.events("teacher"))
    (run,) = mill.told("teacher")["runs"]
    assert (run["ranks"], run["tokens"]) == (1, metrics["tokens"])
    # Both are rounded: the pace to whole tokens, seconds to thousandths.
    pace = run["tokens"] / run["seconds"]
    assert run["tokens_per_second"] == pytest.approx(pace, abs=0.5 + 0.001 * pace / run["seconds"])
    assert sum(metrics["lengths"].values()) == len(rows)
    assert {name: part["rows"] for name, part in metrics["categories"].items()} == Counter(
        row["category"] for row in prompts
    )
    top1 = torch.cat([row.topk_logprobs[:, 0].float().exp() for row in rows]).mean()
    assert metrics["mean_top1_probability"] == pytest.approx(float(top1), abs=2e-3)  # stored in float16


def test_rows_stand_by_length_and_id_in_shards_of_one_size(
        mill: Mill, rows: list[Row], prompts: list[dict]) -> None:
    ordered = sorted(prompts, key=lambda row: (len(row["prompt"]), row["id"]))
    assert [row.prompt.tolist() for row in rows] == [row["prompt"] for row in ordered]
    shards = sorted(mill.folder("teacher").glob("train-*"))
    sizes = [sum(counts["rows"] for counts in read_tally(path).values()) for path in shards]
    assert sizes == [SHARD_ROWS] * (len(rows) // SHARD_ROWS) + [len(rows) % SHARD_ROWS]
    for path in shards:
        tensors = load_file(path)
        positions = len(tensors["continuation_ids"])
        assert tensors["topk_ids"].shape == tensors["topk_logprobs"].shape == (positions, TOP_K)
        assert tensors["topk_logprobs"].dtype == torch.float16


def test_prompts_stay_in_their_file_until_their_shard_is_due(tmp_path: Path) -> None:
    rows = [{"id": f"s/{number}", "category": "math", "prompt": [*range(number, number + 300 - number % 7)]}
            for number in range(1000)]
    for name in EVALUATION_SETS:
        write_jsonl(tmp_path / f"{name}.jsonl", [])
    write_jsonl(tmp_path / "train.jsonl", rows)
    job = replace(make_job(tmp_path), inputs={"data": tmp_path},
                  config=SimpleNamespace(teacher=SimpleNamespace(shard_rows=64)))
    tracemalloc.start()
    tasks = [task for task in tasks_of(job) if task.kind == "shard"]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 500 * len(rows)  # their ids alone, as a list of integers, take ten times that
    ordered = sorted(rows, key=lambda row: (len(row["prompt"]), row["id"]))
    assert [row for task in tasks for row in task.rows] == ordered
    assert [len(task.rows) for task in tasks] == [64] * 15 + [40]


def test_a_threshold_without_continuations_to_reproduce_is_told(mill: Mill, tmp_path: Path) -> None:
    copy = mill.copy(tmp_path / "copy")
    copy.replace("profiles/toy.toml", "stop_on_repeat = 4", "stop_on_repeat = 4\nmin_fidelity = 0.5")
    said = copy.run("teacher", "--with-upstream")
    assert "no dev conversation comes with a continuation: teacher.min_fidelity stops nothing" in said
    assert "stops nothing" not in "".join(str(event) for event in mill.events("teacher"))


@pytest.mark.parametrize("name", ["dev", "examples", "heldout"])
def test_evaluation_sets_get_continuations_and_nothing_else_changes(mill: Mill, name: str) -> None:
    given = {row["id"]: row for row in read_jsonl(mill.folder("data") / f"{name}.jsonl")}
    found = list(read_jsonl(mill.folder("teacher") / f"{name}.jsonl"))
    assert [row["id"] for row in found] == sorted(given)
    assert all(row.pop("continuation") for row in found)
    assert {row["id"]: row for row in found} == given


def test_a_shard_that_lost_its_end_is_told_by_name(mill: Mill, tmp_path: Path) -> None:
    copy = mill.copy(tmp_path / "copy")
    shard = copy.folder("teacher") / "train-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    copy.replace("profiles/toy.toml", "steps = 12\n", "steps = 11\n")
    sentence = "train-00001.safetensors differs from its record; make teacher repairs it"
    assert sentence in copy.run("distill", code=2)
    with pytest.raises(UserError, match=r"train-00001\.safetensors: not a whole shard"):
        read_rows(shard.parent)
