"""Whether a sampled text could have been typed by a user."""

import re
import unicodedata
from collections.abc import Callable, Sequence

from stages.decontamination import words

MIN_WORDS = 3
REPEATED_WORDS = 8      # no run of so many words may occur twice
MIN_DISTINCT_SHARE = 0.4
MIN_ASCII_SHARE = 0.85  # of letters: lets western European languages through, and few others
MIN_LETTER_SHARE = 0.5  # of characters that are not space

_CANNOT = r"i ?(?:can't|can ?not|won't|will not|(?:'?m| am) (?:unable|not able) to)"
_SERVE = r"(?:help|assist|provide|fulfil+|comply|engage|generate|(?:answer|discuss) th(?:at|is))\b"
_MAKERS = r"(?:alibaba|openai|anthropic|google|meta|microsoft|mistral)\b"
_MACHINE = r"(?:language model|(?:ai|virtual|digital|helpful) assistant|chatbot)\b"

# Talk of an assistant, in lower case: the target has slipped into the other role, refuses, or names itself.
_ASSISTANT = re.compile(
    "|".join((
        r"as an ai\b", r"as a (?:large )?language model", r"\bi(?:'?m| am) (?:sorry|an ai\b|here to help)",
        r"^(?:sure|certainly|absolutely|of course|great|yes|hello|hi)[,!.]? (?:here|i'?d be|i can|i'?m|this)",
        r"\bhow (?:can|may) i (?:help|assist)", rf"\b{_CANNOT} {_SERVE}",
        rf"^(?:sorry|(?:my )?apologies|unfortunately)[,.!]? (?:but )?{_CANNOT}\b",
        r"^here(?:'s| is| are) (?:a|an|the|some)\b", r"\bi hope this helps", r"\bfeel free to",
        rf"\bi(?:'?m| am) (?:[\w.-]+,? )?an? (?:[\w-]+ )?{_MACHINE}",
        rf"\b(?:created|developed|trained|made) by {_MAKERS}", r"\blet me know if",
        r"\b(?:smollm|qwen)[\d.]*\b", r"\bhugging ?face\b", r"\balibaba cloud\b",
        r"^(?:user|assistant|system)\b",
    )),
)


def fault(text: str, special_texts: Sequence[str]) -> str | None:
    """Return why a text is not a plausible user turn, or None."""
    found = words(text)
    faults: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("special token", lambda: any(special in text for special in special_texts)),
        ("short", lambda: len(found) < MIN_WORDS),
        ("unreadable", lambda: _unreadable(text)),
        ("other script", lambda: _other_script(text)),
        ("assistant talk", lambda: _ASSISTANT.search(_plain(text)) is not None),
        ("repeats itself", lambda: _repeats(found)),
    )
    return next((reason for reason, present in faults if present()), None)


def _plain(text: str) -> str:
    return text.lower().replace("\u2019", "'").replace("\u02bc", "'")


def _unreadable(text: str) -> bool:
    spaced = " ".join(text.split())
    if "\ufffd" in spaced or (not spaced.isprintable() and any(map(_control, spaced))):
        return True
    return sum(map(str.isalpha, spaced)) < MIN_LETTER_SHARE * (len(spaced) - spaced.count(" "))


def _control(character: str) -> bool:
    return unicodedata.category(character)[0] == "C" and character != "\u200d"


def _other_script(text: str) -> bool:
    if text.isascii():
        return False
    letters = [character for character in text if character.isalpha()]
    return sum(letter.isascii() for letter in letters) < MIN_ASCII_SHARE * len(letters)


def _repeats(found: Sequence[str]) -> bool:
    if len(set(found)) < MIN_DISTINCT_SHARE * len(found):
        return True
    runs = list(zip(*(found[start:] for start in range(REPEATED_WORDS)), strict=False))
    return len(set(runs)) < len(runs)
