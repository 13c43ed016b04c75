"""The templates: wide enough, seeded, and with every place filled."""

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
from sources import REPOSITORY, make_job, source

from stages.errors import UserError
from stages.profile import CATEGORIES
from stages.sources import Context, Row, template
from stages.sources.library import load_library

UNFILLED = re.compile(r"\[\[[^\[\]]*\||\{[a-z_]+\d*\}|\{(?:[a-z_]+=)?\d+\.\.\d+")
DRAWS = 5000


def drawn(root: Path, count: int, seed: int = 0, name: str = "templates") -> list[Row]:
    job = make_job(root, [source(name)])
    context = Context(job.__class__(**{**job.__dict__, "seed": seed}), tokenizer=None)  # type: ignore[arg-type]
    return list(itertools.islice(template.rows(source(name), context), count))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return drawn(tmp_path_factory.mktemp("templates"), DRAWS)


def test_draws_hardly_ever_repeat(rows: list[Row]) -> None:
    assert len({str(row.messages) for row in rows}) > 4500


def test_there_are_many_templates_of_every_category(rows: list[Row]) -> None:
    families = {(row.category, row.family) for row in rows}
    by_category = Counter(category for category, _ in families)
    assert len(families) >= 300
    assert set(by_category) == set(CATEGORIES)
    assert min(by_category.values()) >= 35


def test_categories_come_about_equally_often(rows: list[Row]) -> None:
    counts = Counter(row.category for row in rows)
    assert min(counts.values()) > 0.8 * DRAWS / len(CATEGORIES)


def test_multi_turn_and_foreign_shares(rows: list[Row]) -> None:
    assert 0.1 < sum(len(row.messages) > 1 for row in rows) / DRAWS < 0.3
    assert 0.02 < sum(row.language != "en" for row in rows) / DRAWS < 0.1
    assert {row.language for row in rows} == {"en", "es", "fr", "de", "pt", "it"}


def test_every_place_is_filled(rows: list[Row]) -> None:
    codes = load_library(REPOSITORY / template.FOLDER).verbatim
    for row in rows:
        for message in row.messages:
            text = message["content"]
            for value in itertools.chain.from_iterable(codes.values()):
                text = text.replace(value.strip(), "")
            assert not UNFILLED.search(text), text
            assert text or message["content"], row.family


def test_turns_alternate_and_end_with_the_user(rows: list[Row]) -> None:
    for row in rows:
        roles = [message["role"] for message in row.messages]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        assert len(roles) % 2


def test_lengths_reach_from_a_few_words_to_many(rows: list[Row]) -> None:
    lengths = sorted(len(row.messages[-1]["content"].split()) for row in rows)
    assert lengths[DRAWS // 20] <= 5
    assert lengths[-DRAWS // 50] >= 70


def test_registers_differ(rows: list[Row]) -> None:
    firsts = [row.messages[0]["content"] for row in rows if row.language == "en"]
    assert 0.1 < sum(text == text.lower() for text in firsts) / len(firsts) < 0.4


def test_same_seed_same_rows_other_seed_others(tmp_path: Path) -> None:
    assert drawn(tmp_path, 400) == drawn(tmp_path, 400)
    assert drawn(tmp_path, 400) != drawn(tmp_path, 400, seed=1)
    assert drawn(tmp_path, 400) != drawn(tmp_path, 400, name="others")


def test_a_place_holds_its_value_through_the_conversation() -> None:
    library = load_library(REPOSITORY / template.FOLDER)
    filling = template.Filling(library, __import__("random").Random(3))
    assert re.fullmatch(r"(\w+) (\w+) \1 (\d\d) \3", filling.expand("{name} {name2} {name} {n=10..99} {n}"))
    assert filling.expand("{name}") == filling.expand("{name}") != filling.expand("{name2}")
    assert int(filling.expand("{10..30/10}")) in (10, 20, 30)


def test_articles_follow_their_vowels(rows: list[Row]) -> None:
    texts = [message["content"] for row in rows for message in row.messages if row.language == "en"]
    plain = [text for text in texts if "```" not in text]
    assert not [text for text in plain if re.search(r"\ba (?:umbrella|octopus|otter|elevator|eel)\b", text)]


def _library(folder: Path, text: str) -> Path:
    for category in CATEGORIES:
        (folder / f"{category}.toml").write_text(f"[[template]]\nid = '{category}'\ntext = 'plain'\n")
    (folder / "writing.toml").write_text(text)
    (folder / "fillers.toml").write_text("[lists]\nname = ['Ann', 'Bo']\n[verbatim]\ncode = ['x = {name}']\n")
    return folder


@pytest.mark.parametrize(("text", "complaint"), [
    ("[[template]]\nid = 'a'\ntext = 'Hi {nobody}'", r"template a: \{nobody\} is neither"),
    ("[[template]]\nid = 'a'\nturns = ['one', 'two']", "template a: turns must end with the user's"),
    ("[[template]]\nid = 'math'\ntext = 'again'", "ids used twice: math"),
])
def test_a_faulty_template_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_library(_library(tmp_path, text))


def test_verbatim_text_is_copied_and_not_roughened(tmp_path: Path) -> None:
    library = load_library(_library(tmp_path, "[[template]]\nid = 'a'\ntext = 'Fix this: {code}'"))
    made = {template.draw(library, library.templates[0], str(i)).messages[0]["content"] for i in range(200)}
    assert made == {"Fix this: x = {name}"}


def test_the_manifest_names_the_files(tmp_path: Path) -> None:
    context = Context(make_job(tmp_path, [source()]), tokenizer=None)  # type: ignore[arg-type]
    origin = template.origin(source(), context)
    assert set(origin["files"]) == {
        f"stages/sources/templates/{name}.toml" for name in (*CATEGORIES, "fillers")
    }
    assert origin["licence"] == "Apache-2.0"
