"""Which parts of the examples are replayed to project the serving time of the held-out set.

The contest's own rehearsal projects it from windows of 76 tokens, spread from openings to ends, of 32 of the
40 examples: 2,432 tokens scaled to 44,314, which it calls right within about 10%. An opening costs a prefill
of the prompt, a later window one of the prompt and all before it, so the spread matters.
"""

from collections.abc import Sequence
from dataclasses import replace

from drafter.replay import Conversation

WINDOW_TOKENS = 76
WINDOWS = 32


def windows(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return windows of up to 32 conversations, the first at its opening, the last at its end.

    A window's prompt is the conversation's with all of the continuation that lies before it.
    """
    talks = [talk for talk in conversations if talk.continuation]
    chosen = [talks[index] for index in _spread(len(talks), min(len(talks), WINDOWS))]
    found = []
    for index, talk in enumerate(chosen):
        room = max(len(talk.continuation) - WINDOW_TOKENS, 0)
        start = round(room * index / max(len(chosen) - 1, 1))
        found.append(_window(talk, start))
    return found


def windows_save_time(conversations: Sequence[Conversation]) -> bool:
    """Whether the windows are less than half of the whole; if not, the whole tells the time as quickly."""
    whole, parts = (sum(len(talk.continuation) for talk in talks)
                    for talks in (conversations, windows(conversations)))
    return 2 * parts < whole


def openings(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return the first 76 tokens of every conversation."""
    return [_window(talk, 0) for talk in conversations]


def _window(talk: Conversation, start: int) -> Conversation:
    text = talk.continuation
    return replace(talk, prompt=(*talk.prompt, *text[:start]),
                   continuation=text[start : start + WINDOW_TOKENS])


def _spread(count: int, chosen: int) -> list[int]:
    """Return `chosen` indices of `count`, evenly spread from the first to the last."""
    return [round(index * (count - 1) / max(chosen - 1, 1)) for index in range(chosen)]
