"""What a conversation has to pass before it becomes prompts, many conversations at a time."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.decontamination import Contaminants, words
from stages.duplicates import NearDuplicates, sketches
from stages.models.tokenizer import Tokenizer
from stages.sources import Row


@dataclass(frozen=True)
class Sieved:
    """One conversation: why none of it can be used, or for each of its user turns the ids, or why not.

    Conversations whose first user turns are the same words have the same `beginning`.
    """

    row: Row
    fault: str | None
    turns: tuple[list[int] | str, ...] = ()
    beginning: bytes = b""


@dataclass(frozen=True)
class _Read:
    """A conversation with its messages' words."""

    row: Row
    words: list[list[str]]

    @property
    def asked(self) -> list[str]:
        """The words of the user."""
        return [word for message in self.words[::2] for word in message]

    def key(self, turn: int) -> bytes:
        """Return what two prompts of the same words share."""
        messages = zip(self.row.messages[: turn + 1], self.words, strict=False)
        plain = "\n".join(" ".join(found) or message["content"] for message, found in messages)
        return hashlib.blake2b(plain.encode(), digest_size=12).digest()


class Sieve:
    """What a conversation has to pass; it remembers what went through, to refuse it a second time."""

    def __init__(self, tokenizer: Tokenizer, contaminants: Contaminants, max_prompt_tokens: int,
                 near_duplicate: float, template_arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._contaminants = contaminants
        self._limit = max_prompt_tokens
        self._arguments = template_arguments
        self._seen: set[bytes] = set()
        self._near = NearDuplicates(near_duplicate)
        self._special = re.compile("|".join(map(re.escape, tokenizer.special_texts)) or r"(?!)")

    def pass_through(self, rows: Sequence[Row]) -> Iterator[Sieved]:
        """Yield what becomes of each conversation, in order; what is not taken from here is not remembered.

        Conversations are tokenised and sketched all at once; only the comparison with earlier ones goes one
        by one.
        """
        read = [_Read(row, [words(message["content"]) for message in row.messages]) for row in rows]
        contaminated = self._contaminants.faults([one.words for one in read])
        faults = [self._own_fault(row) or fault for row, fault in zip(rows, contaminated, strict=True)]
        clean = [one for one, fault in zip(read, faults, strict=True) if fault is None]
        cut = [(one, turn) for one in clean for turn in range(0, len(one.row.messages), 2)]
        texts = [self._tokenizer.render(one.row.messages[: turn + 1], **self._arguments) for one, turn in cut]
        prompts = iter(self._tokenizer.encode_batch(texts))
        drawn = iter(sketches([one.asked for one in clean]))
        for one, fault in zip(read, faults, strict=True):
            if fault is not None:
                yield Sieved(one.row, fault)
                continue
            ids = [next(prompts) for _ in range(0, len(one.row.messages), 2)]
            yield self._compared(one, ids, next(drawn))

    def _own_fault(self, row: Row) -> str | None:
        """Return what is wrong with a conversation by itself; a special token would become a turn's end."""
        texts = [message["content"] for message in row.messages]
        if not texts or not all(text.strip() for text in texts):
            return "empty"
        return "special token" if any(map(self._special.search, texts)) else None

    def _compared(self, one: _Read, prompts: list[list[int]], sketch: Any) -> Sieved:
        keys = [one.key(2 * turn) for turn in range(len(prompts))]
        turns: list[list[int] | str] = []
        for ids, key in zip(prompts, keys, strict=True):
            fault = "too long" if len(ids) > self._limit else "same words" if key in self._seen else None
            turns.append(fault or ids)
        fresh = any(not isinstance(turn, str) for turn in turns)
        if fresh and one.asked:
            if self._near.like(sketch) is not None:
                return Sieved(one.row, "near-duplicate")
            self._near.add(sketch)
        self._seen.update(key for key, turn in zip(keys, turns, strict=True) if not isinstance(turn, str))
        return Sieved(one.row, None, tuple(turns), keys[0])
