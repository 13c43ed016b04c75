"""Words shared with evaluation conversations: what counts, and what must not."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.decontamination import Contaminants, words

LONG = ("My neighbour keeps twelve hens in a yard that is far too small and every morning at five "
        "they wake the whole street.")
WORD = st.text(alphabet="abcdefghij", min_size=1, max_size=6)


class Planted:
    """Contaminants of one conversation, asked with texts."""

    def __init__(self, *texts: str, shared_words: int = 13) -> None:
        self.found = Contaminants(shared_words, near=0.99)
        self.found.add("dev", [words(text) for text in texts])

    def touches(self, texts: list[str]) -> bool:
        (fault,) = self.found.faults([[words(text) for text in texts]])
        assert fault in (None, "shares words with dev")
        return fault is not None


planted = Planted


def test_words_are_lower_case_without_punctuation() -> None:
    assert words("Don’t STOP—it's “Größe” 3.5%!") == ["dont", "stop", "its", "grösse", "3", "5"]
    assert words("日本 ok") == ["日", "本", "ok"]
    assert words("Why,  NOT?\n") == ["why", "not"]


def test_the_same_and_the_lightly_edited_are_caught() -> None:
    found = planted(LONG)
    assert found.touches([LONG])
    assert found.touches([LONG.upper().replace(" ", "\n ").replace(".", "!!")])
    assert found.touches(["Please help: " + LONG.replace("hens", "geese") + " What can I do?"])
    assert found.touches(["Short", "answer", LONG])


def test_fewer_shared_words_are_no_match() -> None:
    twelve, thirteen = " ".join(words(LONG)[:12]), " ".join(words(LONG)[:13])
    found = planted(f"{LONG} Of those who live there nobody has said a word, and I do not know why that is.")
    assert not found.touches([f"so {twelve} and then nothing else that was ever written there"])
    assert found.touches([f"so {thirteen} and then nothing else that was ever written there"])


def test_a_run_across_turns_counts() -> None:
    found = planted("Give me a recipe for soup", "Which vegetables do you have at home?", "Leeks")
    assert found.touches(["Give me a recipe for soup\n\nWhich vegetables do you have at home? Leeks"])


def test_short_conversations_match_whole() -> None:
    found = planted("Which herbs like shade?")
    assert found.touches(["which HERBS like shade"])
    assert not found.touches(["Which herbs like shade and cold nights?"])


def test_a_short_turn_of_a_long_conversation_matches_whole() -> None:
    found = planted(LONG, "Is there a law?")
    assert found.touches(["Hello, I have a question about hens.", "Which?", "is there a LAW"])
    assert not found.touches(["Is there a law on bees?"])


def test_compatible_forms_of_letters_are_the_letters() -> None:
    wide = "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in LONG)
    assert planted(LONG).touches([wide])


def test_a_turn_of_three_words_belongs_to_nobody() -> None:
    assert not planted("Please go on", LONG).touches(["Please go on"])


@given(st.lists(WORD, min_size=13, max_size=30), st.lists(WORD, max_size=8), st.lists(WORD, max_size=8))
def test_any_text_around_a_run_is_caught(run: list[str], before: list[str], after: list[str]) -> None:
    assert planted(" ".join(run)).touches([" ".join([*before, *run, *after])])


@given(st.lists(WORD, min_size=1, max_size=40), st.integers(2, 15))
def test_disjoint_words_never_match(text: list[str], shared_words: int) -> None:
    other = " ".join(f"{word}x" for word in text)
    assert not planted(" ".join(text), shared_words=shared_words).touches([other])


ROOT = Path(__file__).resolve().parent.parent
FILLING = [f"filler{number}" for number in range(60)]


def first_messages(name: str) -> list[list[str]]:
    lines = (ROOT / "examples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [words(json.loads(line)["messages"][0]["content"]) for line in lines]


def with_others(text: list[str], every: int, first: int) -> list[str]:
    """The text with every n-th word replaced."""
    return [f"other{place}" if place % every == first else word for place, word in enumerate(text)]


@pytest.mark.parametrize("first", range(6))
def test_every_example_is_caught_with_each_sixth_word_replaced_and_among_others(first: int) -> None:
    examples, found = first_messages("examples"), Contaminants(13, near=0.5)
    for text in examples:
        found.add("examples", [text])
    edited = [with_others(text, 6, first) for text in examples]
    assert None not in found.faults([[text] for text in edited])
    embedded = found.faults([[[*FILLING, *text, *FILLING]] for text in edited])
    assert set(embedded) == {"holds much of examples"}


def test_what_is_caught_is_counted_for_its_own_set_and_no_set_holds_another() -> None:
    dev, examples = first_messages("dev"), first_messages("examples")
    found = Contaminants(13, near=0.5)
    for name, texts in (("dev", dev), ("examples", examples)):
        assert found.faults([[text] for text in texts]) == [None] * len(texts)
        for text in texts:
            found.add(name, [text])
    told = found.faults([[FILLING, [*FILLING, *with_others(text, 6, 2)]] for text in examples])
    assert set(told) == {"holds much of examples"}


def test_three_runs_in_common_are_anybodys_words() -> None:
    five, six = "please write it in verse", "please write it in free verse"
    assert Contaminants(13, near=0.5).faults([[words(six)]]) == [None]
    for text, fault in ((five, None), (six, "holds much of dev")):
        found = Contaminants(13, near=0.5)
        found.add("dev", [words(text)])
        assert found.faults([[[*FILLING, *words(text), *FILLING]]]) == [fault]
