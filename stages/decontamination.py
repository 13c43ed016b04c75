"""Words in common between training text and evaluation conversations."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain

from stages.duplicates import NearDuplicates, sketches

# Scripts written without spaces: each character counts as a word, so that a run of words means something.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_APOSTROPHE = re.compile(r"['\u2018\u2019\u02bc]")
TELLING_WORDS = 4  # a shorter turn ("tell me more") belongs to nobody
RESEMBLING_WORDS = 8  # of a shorter message too little is left to resemble

Words = Sequence[str]


def words(text: str) -> list[str]:
    """Return the words of a text: lower case, without punctuation, in compatible forms of the letters."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return _WORD.findall(_APOSTROPHE.sub("", plain.casefold()))


class Contaminants:
    """The evaluation conversations, which nothing that is trained on may repeat.

    A conversation is a sequence of messages, each given as its words (contents only: neither the chat
    template nor a system prompt, which all prompts share). It is contaminated if it has `shared_words`
    consecutive words in common with an evaluation conversation, within a turn or across turns; where there
    are fewer words than that, if a turn or the whole conversation is the same words; and if a message of it
    resembles one of theirs.

    Args:
        shared_words: length of a run of words that belongs to one text only.
        near: Jaccard similarity of three-word runs from which on two messages resemble each other.
    """

    def __init__(self, shared_words: int, near: float) -> None:
        self._length = shared_words
        self._owners: dict[tuple[str, ...], str] = {}
        self._near = NearDuplicates(near)
        self._names: list[str] = []

    def add(self, name: str, messages: Sequence[Words]) -> None:
        """Add one evaluation conversation of the set `name`."""
        for run in chain(self._runs_of(messages), self._short_of(messages)):
            self._owners.setdefault(run, name)
        for sketch in sketches([found for found in messages if len(found) >= RESEMBLING_WORDS]):
            self._near.add(sketch)
            self._names.append(name)

    def faults(self, conversations: Sequence[Sequence[Words]]) -> list[str | None]:
        """Return for each conversation which set it repeats, in words that are counted; None if none."""
        long = [(place, found) for place, messages in enumerate(conversations) for found in messages
                if len(found) >= RESEMBLING_WORDS]
        faults = [self._shared(messages) for messages in conversations]
        for (place, _), sketch in zip(long, sketches([found for _, found in long]), strict=True):
            like = self._near.like(sketch)
            if like is not None and faults[place] is None:
                faults[place] = f"resembles {self._names[like]}"
        return faults

    def _shared(self, messages: Sequence[Words]) -> str | None:
        if self._owners.keys().isdisjoint(chain(self._runs_of(messages), self._short_of(messages))):
            return None
        runs = chain(self._runs_of(messages), self._short_of(messages))
        return f"shares words with {next(self._owners[run] for run in runs if run in self._owners)}"

    def _runs_of(self, messages: Sequence[Words]) -> Iterator[tuple[str, ...]]:
        found = [word for message in messages for word in message]
        return zip(*(found[start:] for start in range(self._length)), strict=False)

    def _short_of(self, messages: Sequence[Words]) -> Iterator[tuple[str, ...]]:
        for found in (*messages, [word for message in messages for word in message]):
            if TELLING_WORDS <= len(found) < self._length:
                yield tuple(found)
