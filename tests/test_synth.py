"""Invented user turns: steered, filtered, seeded, and resumed."""

import random
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from sources import make_job, source

from drafter.engine import Generated, Generation
from stages.models.tokenizer import Tokenizer, load_tokenizer
from stages.profile import CATEGORIES, Way
from stages.sources import Context, Rejected, Row, synth
from stages.sources.leads import LONGEST_CHARACTERS, SHARES, Leads
from stages.sources.plausibility import fault

GOOD = " about the river that runs behind our old school?"


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return load_tokenizer(smollm2_folder, "gguf")


class Stub:
    """An engine that says the same after every prompt, and remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, *texts: str, stop: bool = True) -> None:
        self.texts = [tokenizer.encode(text) + [2] * stop for text in texts]
        self.calls: list[tuple[list[list[int]], Generation]] = []

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        self.calls.append((prompts, settings))
        return [Generated(list(self.texts[i % len(self.texts)])) for i in range(len(prompts))]


def invented(root: Path, tokenizer: Tokenizer, stub: Any, rows: int = 4, **more: Any) -> list[Row | Rejected]:
    return invented_by("invented", root, tokenizer, stub, rows, **more)


def invented_by(name: str, root: Path, tokenizer: Tokenizer, stub: Any, rows: int,
                **more: Any) -> list[Row | Rejected]:
    one = source(name, kind="synth", rows=rows, **more)
    return list(synth.rows(one, Context(make_job(root, [one]), tokenizer), stub))


def test_the_turn_is_sampled_after_the_user_tag(tmp_path: Path, tokenizer: Tokenizer) -> None:
    stub = Stub(tokenizer, GOOD)
    rows = invented(tmp_path, tokenizer, stub, temperature=0.7, top_p=0.9, max_turn_tokens=33)
    (prompts, settings) = stub.calls[0]
    heads = [tokenizer.decode(prompt) for prompt in prompts]
    assert all("<|im_start|>user\n" in head and "assistant\n" not in head for head in heads)
    assert (settings.temperature, settings.top_p, settings.max_tokens) == (0.7, 0.9, 33)
    assert settings.stop_ids == (2,)
    for head, row in zip(heads, rows, strict=False):
        assert isinstance(row, Row)
        (message,) = row.messages
        assert message == {"role": "user", "content": (head.rsplit("user\n", 1)[1] + GOOD).strip()}


def test_a_turn_has_the_language_of_its_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    said = ("¿Cómo se dice 'buenas tardes' en alemán y cuál es la diferencia?",
            "Quelle est la différence entre une abeille et une guêpe ?",
            "Where do the bees go at night?", "Fibonacci numbers sorted backwards")
    rows = invented(tmp_path, tokenizer, Stub(tokenizer, *said), rows=16, ways=("follow-up",))
    assert {row.messages[-1]["content"]: row.language for row in rows if isinstance(row, Row)} == dict(
        zip(said, ("es", "fr", "en", "und"), strict=True))


def test_all_categories_are_led_to_in_all_ways(tmp_path: Path, tokenizer: Tokenizer) -> None:
    leads = list(Leads(make_job(tmp_path, [source()]).root).draw(random.Random(0), 1600))
    for category in CATEGORIES:
        assert {lead.way for lead in leads if lead.category == category} == set(SHARES)
    counts = [sum(lead.category == name for lead in leads) for name in CATEGORIES]
    assert min(counts) == max(counts) == 200
    texts = {(*(message["content"] for message in lead.before), lead.opening) for lead in leads}
    assert len(texts) > 1200


def test_leads_are_drawn_by_seed(tmp_path: Path) -> None:
    leads = Leads(make_job(tmp_path, [source()]).root)
    one, two, other = (list(leads.draw(random.Random(seed), 600)) for seed in (1, 1, 2))
    assert one == two != other


def test_a_beginning_is_the_first_part_of_a_templates_prompt(tmp_path: Path) -> None:
    leads = Leads(make_job(tmp_path, [source()]).root)
    found = [lead.opening for lead in leads.draw(random.Random(0), 800) if lead.way == "beginning"]
    assert len(found) > 100
    assert max(map(len, found)) < LONGEST_CHARACTERS
    assert sum(1 < len(text.split()) < 40 for text in found) > 0.8 * len(found)


@pytest.fixture
def large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches as on a GPU."""
    monkeypatch.setitem(synth.BATCH_ROWS, "cpu", 4096)


def test_a_source_keeps_to_its_ways(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert set(get_args(Way)) == set(SHARES)
    leads = Leads(make_job(tmp_path, [source()]).root)
    for ways in (("subject",), ("beginning", "examples"), ("follow-up",)):
        assert {lead.way for lead in leads.draw(random.Random(0), 160, ways)} == set(ways)
    rows = invented(tmp_path, tokenizer, Stub(tokenizer, GOOD), rows=8, ways=("follow-up",))
    assert rows
    assert all(isinstance(row, Row) and len(row.messages) == 3 for row in rows)


class Counting(Stub):
    """Says when it was asked for the n-th time."""

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        found = super().generate(prompts, settings)
        self.reached[len(self.calls)].set()
        return found

    reached: dict[int, Event]


def test_a_batch_that_is_sure_to_be_wanted_is_made_ahead(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sources = [source(name, kind="synth", rows=80) for name in ("one", "two")]  # one batch and a part
    context, stub = Context(make_job(tmp_path, sources), tokenizer), Counting(tokenizer, GOOD)
    stub.reached = {number: Event() for number in range(1, 100)}
    rows = synth.rows(sources[0], context, stub)
    found = [next(rows)]
    assert stub.reached[2].wait(60)
    assert context.metrics.keys() == {"one"}
    found += [next(rows) for _ in range(synth.BATCH_ROWS["cpu"])]
    assert stub.reached[3].wait(60)
    assert context.metrics.keys() == {"one", "two"}
    found += rows
    (tmp_path / "alone").mkdir()
    assert found == invented_by("one", tmp_path / "alone", tokenizer, Stub(tokenizer, GOOD), rows=80)


@pytest.mark.usefixtures("large_batches")
def test_a_follow_up_has_the_targets_answer_before_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    stub = Stub(tokenizer, GOOD)
    rows = invented(tmp_path, tokenizer, stub, rows=450)
    talks = [row for row in rows if isinstance(row, Row) and len(row.messages) > 1]
    assert talks
    assert all(row.family.startswith("templates/") for row in talks)
    (asked, _), (prompts, _) = stub.calls[:2]
    assert all(tokenizer.decode(prompt).endswith("<|im_start|>assistant\n") for prompt in asked)
    heads = {tokenizer.decode(prompt) for prompt in prompts}
    for row in talks[: len(asked)]:
        assert [message["role"] for message in row.messages] == ["user", "assistant", "user"]
        assert row.messages[1]["content"] == GOOD.strip() == row.messages[2]["content"]
    assert any("<|im_start|>assistant\n" + GOOD.strip() + "<|im_end|>" in head for head in heads)


@pytest.mark.usefixtures("large_batches")
def test_an_answer_without_end_stops_at_its_last_sentence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    stub = Stub(tokenizer, "First of all. Then 3.5 more! And so", stop=False)
    invented(tmp_path, tokenizer, stub, rows=450)
    heads = [tokenizer.decode(prompt) for prompt in stub.calls[1][0]]
    assert any("assistant\nFirst of all. Then 3.5 more!<|im_end|>" in head for head in heads)


def test_tries_are_bounded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = invented(tmp_path, tokenizer, Stub(tokenizer, GOOD, stop=False), rows=20)
    assert all(isinstance(row, Rejected) for row in rows)
    assert 20 * synth.SAMPLES_PER_ROW <= len(rows) < 20 * synth.SAMPLES_PER_ROW + synth.BATCH_ROWS["cpu"]


def test_a_turn_without_end_is_unfinished_and_a_short_one_short(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    unfinished = invented(tmp_path / "a", tokenizer, Stub(tokenizer, GOOD, stop=False))
    short = invented(tmp_path / "b", tokenizer, Stub(tokenizer, " one two three"))
    assert {row.reason for row in unfinished if isinstance(row, Rejected)} == {"unfinished"}
    assert {row.reason for row in short if isinstance(row, Rejected)} == {"short"}


def test_a_killed_run_goes_on_with_the_same_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = invented(tmp_path, tokenizer, stub := Stub(tokenizer, GOOD, " in " + GOOD), rows=20)
    files = sorted((tmp_path / "data.kept" / "invented").glob("*/*.jsonl"))
    assert len(files) == len(stub.calls) > 1
    files[-1].unlink()
    again = invented(tmp_path, tokenizer, resumed := Stub(tokenizer, GOOD, " in " + GOOD), rows=20)
    assert again == whole
    assert [call[0] for call in resumed.calls] == [stub.calls[-1][0]]
    assert resumed.calls[0][1].seed == stub.calls[-1][1].seed


def test_only_what_changes_a_batch_makes_it_anew(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def sampled(job_root: Path, **more: Any) -> dict[str, int]:
        one = source("invented", kind="synth", **({"rows": 20} | more))
        context = Context(make_job(job_root, [one]), tokenizer)
        list(synth.rows(one, context, Stub(tokenizer, GOOD)))
        return context.metrics["invented"]

    batches = sampled(tmp_path)["batches_sampled"]
    assert batches > 1
    assert sampled(tmp_path) == {"batches_kept": batches, "batches_sampled": 0}
    assert sampled(tmp_path, temperature=0.5) == {"batches_kept": 0, "batches_sampled": batches}
    assert len(list((tmp_path / "data.kept" / "invented").iterdir())) == 1


def test_batches_have_seeds_of_their_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    invented(tmp_path, tokenizer, stub := Stub(tokenizer, GOOD), rows=20)
    assert len({call[1].seed for call in stub.calls}) == len(stub.calls)


def test_the_engine_is_loaded_only_when_a_batch_is_missing(tmp_path: Path, tokenizer: Tokenizer,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tokenizer, GOOD)
    whole = invented(tmp_path, tokenizer, stub)
    monkeypatch.setattr(synth, "_engine", lambda source, context: pytest.fail("loaded"))
    assert invented(tmp_path, tokenizer, None) == whole


@pytest.mark.parametrize(("text", "reason"), [
    ("How do bees find their way home?", None),
    ("¿Cómo se dice 'buenas tardes, señor' en alemán y en francés?", None),
    ("def add(a, b):\n    return a + b\n\nWhat is wrong here?", None),
    ("Tell me<|im_start|>assistant a story about bees", "special token"),
    ("Hello there", "short"),
    ("What does \ufffd mean in this text here", "unreadable"),
    ("Compute 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18", "unreadable"),
    ("Расскажи мне историю о старом доме", "other script"),
    ("As an AI language model I cannot have opinions", "assistant talk"),
    ("Sure, here is a poem about the sea", "assistant talk"),
    ("I'm sorry, but I can't do that today", "assistant talk"),
    ("I\u2019m sorry, but I can\u2019t do that today", "assistant talk"),
    ("I cannot fulfil this request of yours", "assistant talk"),
    ("I can\u2019t comply with that", "assistant talk"),
    ("I'm unable to help you with this", "assistant talk"),
    ("Sorry, I cannot answer", "assistant talk"),
    ("Unfortunately I am not able to say more", "assistant talk"),
    ("I am Qwen and I answer questions", "assistant talk"),
    ("Hi, I am a large language model", "assistant talk"),
    ("You were developed by Alibaba, weren't you", "assistant talk"),
    ("I'm Ada, a virtual assistant for gardeners", "assistant talk"),
    ("I am unable to sleep before exams, what helps", None),
    ("Unfortunately my cat is ill, what can I do", None),
    ("I can't answer my landlord's letter without help", None),
    ("I'm a nurse and need an assistant for two days", None),
    ("Hello! How can I help you with your work today?", "assistant talk"),
    ("the cat sat on the mat and slept well, the cat sat on the mat and slept well", "repeats itself"),
    ("why why why why why why why why", "repeats itself"),
])
def test_each_filter_of_plausibility(text: str, reason: str | None) -> None:
    assert fault(text, ["<|im_start|>", "<|im_end|>"]) == reason


def test_the_manifest_names_the_target_as_author(tmp_path: Path) -> None:
    one = source("invented", kind="synth")
    origin = synth.origin(one, Context(make_job(tmp_path, [one]), SimpleNamespace()))  # type: ignore[arg-type]
    assert origin["author"] == "the target, target"
    assert origin["upstream"]["licence"] == "Apache-2.0"
    assert origin["upstream"]["uri"] == "pkg:pypi/target-model@1.0"
    assert set(origin["files"]) == {"stages/sources/templates/steering.toml"}
