"""Whether a sampled text could have been typed by a user."""

import re
import unicodedata
from collections.abc import Sequence

from stages.decontamination import words

MIN_WORDS = 3
REPEATED_WORDS = 8      # no run of so many words may occur twice
MIN_DISTINCT_SHARE = 0.4
MIN_ASCII_SHARE = 0.85  # of letters: lets western European languages through, and few others
MIN_LETTER_SHARE = 0.5  # of characters that are not space

# Talk of an assistant: the target has slipped into the other role.
_ASSISTANT = re.compile(
    "|".join((
        r"as an ai\b", r"as a (?:large )?language model", r"\bi(?:'?m| am) (?:sorry|an ai\b|here to help)",
        r"^(?:sure|certainly|absolutely|of course|great|yes|hello|hi)[,!.]? (?:here|i'?d be|i can|i'?m|this)",
        r"\bhow (?:can|may) i (?:help|assist)", r"\bi (?:can't|cannot) (?:help|assist|provide)",
        r"^here(?:'s| is| are) (?:a|an|the|some)\b", r"\bi hope this helps", r"\bfeel free to",
        r"\blet me know if", r"\bsmollm\b", r"\bhugging face\b", r"^(?:user|assistant|system)\b",
    )),
    re.IGNORECASE,
)


def fault(text: str, special_texts: Sequence[str]) -> str | None:
    """Return why a text is not a plausible user turn, or None."""
    found = words(text)
    letters = [character for character in text if character.isalpha()]
    visible = [character for character in text if not character.isspace()]
    faults = {
        "special token": any(special in text for special in special_texts),
        "short": len(found) < MIN_WORDS,
        "unreadable": any(map(_unprintable, text)) or len(letters) < MIN_LETTER_SHARE * len(visible),
        "other script": sum(letter.isascii() for letter in letters) < MIN_ASCII_SHARE * len(letters),
        "assistant talk": _ASSISTANT.search(text) is not None,
        "repeats itself": _repeats(found) or len(set(found)) < MIN_DISTINCT_SHARE * len(found),
    }
    return next((reason for reason, present in faults.items() if present), None)


def _unprintable(character: str) -> bool:
    control = unicodedata.category(character)[0] == "C" and character not in "\n\t\u200d"
    return control or character == "\ufffd"


def _repeats(found: Sequence[str]) -> bool:
    runs = [tuple(found[start : start + REPEATED_WORDS]) for start in range(len(found) - REPEATED_WORDS + 1)]
    return len(set(runs)) < len(runs)
