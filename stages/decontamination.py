"""Words in common between training text and evaluation conversations."""

import re
import unicodedata
from collections.abc import Iterator, Sequence

# Scripts written without spaces: each character counts as a word, so that a run of words means something.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_APOSTROPHE = re.compile(r"['\u2018\u2019\u02bc]")
TELLING_WORDS = 4  # a shorter turn ("tell me more") belongs to nobody

Words = Sequence[str]


def words(text: str) -> list[str]:
    """Return the words of a text: lower case, without punctuation, in compatible forms of the letters."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return _WORD.findall(_APOSTROPHE.sub("", plain.casefold()))


class Contaminants:
    """The runs of words that occur in evaluation conversations.

    A conversation is a sequence of messages, each given as its words (contents only: neither the chat
    template nor a system prompt, which all prompts share). It is contaminated if it has `shared_words`
    consecutive words in common with an evaluation conversation, within a turn or across turns; or, where
    there are fewer words than that, if a turn or the whole conversation is the same words.
    """

    def __init__(self, shared_words: int) -> None:
        self._length = shared_words
        self._runs: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()

    def add(self, messages: Sequence[Words]) -> None:
        """Add one evaluation conversation."""
        self._runs.update(self._runs_of(messages))
        self._short.update(self._short_of(messages))

    def touches(self, messages: Sequence[Words]) -> bool:
        """Say whether a conversation shares words with any that was added."""
        return not (self._runs.isdisjoint(self._runs_of(messages))
                    and self._short.isdisjoint(self._short_of(messages)))

    def _runs_of(self, messages: Sequence[Words]) -> Iterator[tuple[str, ...]]:
        found = [word for message in messages for word in message]
        return zip(*(found[start:] for start in range(self._length)), strict=False)

    def _short_of(self, messages: Sequence[Words]) -> Iterator[tuple[str, ...]]:
        for found in (*messages, [word for message in messages for word in message]):
            if TELLING_WORDS <= len(found) < self._length:
                yield tuple(found)
