"""Words shared with evaluation conversations: what counts, and what must not."""

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
    assert not planted(LONG).touches([f"so {twelve} and then nothing else that was ever written there"])
    assert planted(LONG).touches([f"so {thirteen} and then nothing else that was ever written there"])


def test_a_run_across_turns_counts() -> None:
    found = planted("Give me a recipe for soup", "Which vegetables do you have at home?", "Leeks")
    assert found.touches(["Give me a recipe for soup\n\nWhich vegetables do you have at home? Leeks"])


def test_short_conversations_match_whole() -> None:
    found = planted("Which herbs like shade?")
    assert found.touches(["which HERBS like shade"])
    assert not found.touches(["Which herbs like shade and cold nights?"])


def test_a_turn_of_three_words_belongs_to_nobody() -> None:
    assert not planted("Please go on", LONG).touches(["Please go on"])


@given(st.lists(WORD, min_size=13, max_size=30), st.lists(WORD, max_size=8), st.lists(WORD, max_size=8))
def test_any_text_around_a_run_is_caught(run: list[str], before: list[str], after: list[str]) -> None:
    assert planted(" ".join(run)).touches([" ".join([*before, *run, *after])])


@given(st.lists(WORD, min_size=1, max_size=40), st.integers(2, 15))
def test_disjoint_words_never_match(text: list[str], shared_words: int) -> None:
    other = " ".join(f"{word}x" for word in text)
    assert not planted(" ".join(text), shared_words=shared_words).touches([other])
