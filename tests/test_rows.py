"""Generation in few shapes, as a GPU does it, run on the CPU: the same tokens as row by row."""

import itertools
import random

import pytest
import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter import generation
from drafter import rows as rows_module
from drafter.choice import largest
from drafter.generation import Generator, prefill_groups
from drafter.graphs import Graphs
from drafter.inference import Inference
from drafter.model import Decoder
from drafter.plain import attend_one
from drafter.rows import Generated, Generation, Rows

DECODER = small_decoder("qwen3", seed=41)
STOPS = tuple(range(40, 46))
SETTINGS = [
    Generation(max_tokens=30),
    Generation(max_tokens=30, stop_ids=STOPS, top_k=5),
    Generation(max_tokens=30, stop_ids=STOPS[:2], top_k=3, stop_on_repeat=2),
    Generation(max_tokens=30, stop_ids=STOPS, temperature=0.9, top_p=0.95, seed=4),
]


def prompts(count: int, most: int = 50) -> list[list[int]]:
    number = random.Random(8)
    return [[number.randrange(97) for _ in range(number.randint(1, most))] for _ in range(count)]


def made(decoder: Decoder, given: list[list[int]], settings: Generation, static: bool, rows: int,
         monkeypatch: pytest.MonkeyPatch) -> list[Generated]:
    generator = Generator(Inference(decoder, 128), decoder.config.vocab_size, static)
    monkeypatch.setattr(generator, "_room", lambda *_: rows)
    with torch.inference_mode():
        return generator.generate(given, settings)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_any_number_of_rows_and_static_shapes_give_the_same(
        settings: Generation, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompts(40 if rows > 1 else 5)
    plain = made(DECODER, given, settings, False, 0, monkeypatch)
    static = made(DECODER, given, settings, True, rows, monkeypatch)
    assert [row.tokens for row in static] == [row.tokens for row in plain]
    assert [row.ended for row in static] == [row.ended for row in plain]
    for found, expected in zip(static, plain, strict=True):
        assert torch.equal(found.topk_ids, expected.topk_ids)
        torch.testing.assert_close(found.topk_logprobs, expected.topk_logprobs, atol=1e-4, rtol=0)


def test_rows_of_an_earlier_call_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, settings = Generator(Inference(DECODER, 128), 97, static=True), SETTINGS[2]
    monkeypatch.setattr(generator, "_room", lambda *_: 8)
    first, second = prompts(20), prompts(40)[20:]
    with torch.inference_mode():
        before = generator.generate(second, settings)
        kept = generator.kept
        generator.generate(first, settings)
        again = generator.generate(second, settings)
    assert generator.kept is kept  # the same rows all along
    assert [row.tokens for row in again] == [row.tokens for row in before]


def test_no_prefill_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 64)
    shapes: list[tuple[int, int]] = []
    plain = Rows.prefill

    def prefill(rows: Rows, places: list[int], given: list[list[int]]) -> None:
        shapes.append((len(places), max(map(len, given))))
        plain(rows, places, given)

    monkeypatch.setattr(Rows, "prefill", prefill)
    given = prompts(30)
    found = made(DECODER, given, SETTINGS[0], False, 0, monkeypatch)
    assert max(rows * width for rows, width in shapes) <= 64
    assert sum(rows for rows, _ in shapes) == len(given)
    expected = made(DECODER, given, SETTINGS[0], False, 0, monkeypatch)
    assert [row.tokens for row in found] == [row.tokens for row in expected]


def test_the_work_of_a_batch_shrinks_as_its_rows_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = Rows.step

    def step(self: Rows, count: int, context: int) -> None:
        rows.append(count)
        plain(self, count, context)

    monkeypatch.setattr(Rows, "step", step)
    given = [prompt[:1] for prompt in prompts(60)]
    found = made(DECODER, given, SETTINGS[1], False, 0, monkeypatch)
    alive = [sum(len(row.tokens) > step for row in found) for step in range(30)]
    assert rows == [count for count in alive if count]
    assert len(set(alive)) > 5


def test_out_of_memory_takes_fewer_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(Inference(DECODER, 128), 97, static=True)
    room, tried = {"rows": 64}, []
    expected = made(DECODER, prompts(60), SETTINGS[0], False, 0, monkeypatch)

    def decoding(queries, new, cached, lengths, context):
        tried.append(len(queries))
        if len(queries) > 20:
            room["rows"] //= 2
            raise torch.cuda.OutOfMemoryError("planted")
        return attend_one(queries, new, cached, lengths, context)

    monkeypatch.setattr(rows_module, "attend_one", decoding)
    monkeypatch.setattr(generator, "_room", lambda *_: room["rows"])
    with torch.inference_mode():
        found = generator.generate(prompts(60), SETTINGS[0])
    assert tried[:3] == [60, 32, 16] or tried[:3] == [64, 32, 16]
    assert [row.tokens for row in found] == [row.tokens for row in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "count"), [(97, 1), (97, 5), (64, 64), (5000, 16), (4096, 3), (700, 300)])
def test_largest_is_by_value_and_then_by_id(dtype: torch.dtype, vocab: int, count: int) -> None:
    logits = (torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab)) * 2).to(dtype)
    logits[3] = logits[3].round()  # many ties
    logits[4] = 0.0
    expected = [sorted(range(vocab), key=lambda i: (-row[i], i))[:count] for row in logits.tolist()]
    assert largest(logits, count).tolist() == expected


def test_what_is_no_number_never_points_beyond_the_vocabulary() -> None:
    logits = torch.full((2, 97), torch.nan)
    assert int(largest(logits, 1).max()) < 97
    assert int(largest(logits, 4).max()) < 97


def test_on_a_cpu_a_step_runs_eagerly() -> None:
    graphs, done = Graphs(torch.device("cpu")), []
    for number in range(3):
        graphs.run("key", lambda number=number: done.append(number))
    assert done == [0, 1, 2]


@settings(max_examples=300)
@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=40).map(sorted))
def test_prefill_groups_part_the_rows_and_bound_the_padding(sizes: list[int]) -> None:
    groups = prefill_groups(sizes)
    assert [row for group in groups for row in range(group.start, group.stop)] == list(range(len(sizes)))
    for group in groups:
        rows = sizes[group]
        assert rows
        assert max(rows) * len(rows) <= 2 * sum(rows)


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 2000), min_size=2, max_size=40).map(sorted))
def test_prefill_groups_are_no_smaller_than_they_must_be(sizes: list[int]) -> None:
    groups = prefill_groups(sizes)
    for group, following in itertools.pairwise(groups):
        grown = sizes[group.start : following.start + 1]
        assert max(grown) * len(grown) > 2 * sum(grown)
