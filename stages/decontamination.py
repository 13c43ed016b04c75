"""Words in common between training text and evaluation conversations."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from stages.duplicates import NearDuplicates, shingles, sketched

# Scripts written without spaces: each character counts as a word, so that a run of words means something.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_APOSTROPHE = re.compile(r"['\u2018\u2019\u02bc]")
TELLING_WORDS = 4  # a shorter turn ("tell me more") belongs to nobody
RESEMBLING_WORDS = 8  # of a shorter message too little is left to resemble
TELLING_SHINGLES = 4  # a message with fewer of them may stand in anybody's text
HELD_SHARE = 0.4  # of a message's three-word runs: where every sixth word is another, so much is left

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
    are fewer words than that, if a turn or the whole conversation is the same words; if a message of it
    resembles one of theirs; and if it holds HELD_SHARE of one, edited and among other words.

    Args:
        shared_words: length of a run of words that belongs to one text only.
        near: Jaccard similarity of three-word runs from which on two messages resemble each other.
    """

    def __init__(self, shared_words: int, near: float) -> None:
        self._length = shared_words
        self._owners: dict[tuple[str, ...], str] = {}
        self._near = NearDuplicates(near)
        self._names: list[str] = []
        self._embedded = Embedded()

    def add(self, name: str, messages: Sequence[Words]) -> None:
        """Add one evaluation conversation of the set `name`."""
        for run in chain(self._runs_of(messages), self._short_of(messages)):
            self._owners.setdefault(run, name)
        sets = [shingles(found) for found in messages]
        for found, sketch in zip(messages, sketched(sets), strict=True):
            if len(found) >= RESEMBLING_WORDS:
                self._near.add(sketch)
                self._names.append(name)
        for one in sets:
            self._embedded.add(name, one)

    def faults(self, conversations: Sequence[Sequence[Words]]) -> list[str | None]:
        """Return for each conversation which set it repeats, in words that are counted; None if none."""
        sets = [[shingles(found) for found in messages] for messages in conversations]
        long = [(place, one) for place, messages in enumerate(conversations)
                for found, one in zip(messages, sets[place], strict=True) if len(found) >= RESEMBLING_WORDS]
        faults = [self._shared(messages) for messages in conversations]
        for (place, _), sketch in zip(long, sketched([one for _, one in long]), strict=True):
            like = self._near.like(sketch)
            if like is not None and faults[place] is None:
                faults[place] = f"resembles {self._names[like]}"
        return [fault or self._held(some) for fault, some in zip(faults, sets, strict=True)]

    def _held(self, sets: Sequence[AbstractSet[str]]) -> str | None:
        name = next(filter(None, map(self._embedded.held_by, sets)), None)
        return name and f"holds much of {name}"

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


class Embedded:
    """Messages as their three-word runs, to be found in the midst of other texts; exact, by a dict."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, int]] = []  # the set of each, and how many runs it has
        self._having: dict[str, list[int]] = {}     # run -> the numbers of the messages that have it

    def add(self, name: str, runs: AbstractSet[str]) -> None:
        """Remember a message of the set `name`, if it has runs enough to be told by them."""
        if len(runs) < TELLING_SHINGLES:
            return
        for run in runs:
            self._having.setdefault(run, []).append(len(self._messages))
        self._messages.append((name, len(runs)))

    def held_by(self, runs: AbstractSet[str]) -> str | None:
        """Return the set of a message that a text of these runs holds; None if it holds none."""
        shared = Counter(number for run in self._having.keys() & runs for number in self._having[run])
        for number, count in sorted(shared.items()):
            name, size = self._messages[number]
            if count >= HELD_SHARE * size:
                return name
        return None
