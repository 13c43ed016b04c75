"""Words in common between training text and evaluation conversations."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

# Scripts written without spaces: each character counts as a word, so that a run of words means something.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_APOSTROPHE = re.compile(r"['\u2018\u2019\u02bc]")
TELLING_WORDS = 4  # a shorter turn ("tell me more") belongs to nobody


def words(text: str) -> list[str]:
    """Return the words of a text: lower case, without punctuation, in compatible forms of the letters."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(_APOSTROPHE.sub("", plain))


def normalised(text: str) -> str:
    """Return the text that near-duplicates share: its words with single spaces."""
    return " ".join(words(text))


class Contaminants:
    """The runs of words that occur in evaluation conversations.

    A conversation is a sequence of message texts (contents only: neither the chat template nor a system
    prompt, which all prompts share). It is contaminated if it has `shared_words` consecutive words in common
    with an evaluation conversation, within a turn or across turns; or, where there are fewer words than
    that, if a turn or the whole conversation is the same words.
    """

    def __init__(self, shared_words: int) -> None:
        self._length = shared_words
        self._runs: set[str] = set()
        self._short: set[str] = set()

    def add(self, texts: Sequence[str]) -> None:
        """Add one evaluation conversation."""
        self._runs.update(self._runs_of(texts))
        self._short.update(self._short_of(texts))

    def touches(self, texts: Sequence[str]) -> bool:
        """Say whether a conversation shares words with any that was added."""
        if any(run in self._runs for run in self._runs_of(texts)):
            return True
        return any(turn in self._short for turn in self._short_of(texts))

    def _runs_of(self, texts: Iterable[str]) -> Iterator[str]:
        found = [word for text in texts for word in words(text)]
        for start in range(len(found) - self._length + 1):
            yield " ".join(found[start : start + self._length])

    def _short_of(self, texts: Sequence[str]) -> Iterator[str]:
        for text in (*texts, " ".join(texts)):
            found = words(text)
            if TELLING_WORDS <= len(found) < self._length:
                yield " ".join(found)
