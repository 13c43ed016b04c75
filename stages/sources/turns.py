"""Turns as data sets write them: role and content, from and value, or plain texts of user and assistant."""

from collections.abc import Mapping
from typing import Any

from stages.models.tokenizer import Message

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def alternating(turns: Any) -> list[Message]:
    """Return the turns as far as user and assistant alternate, up to the user's last; no system prompt."""
    messages: list[Message] = []
    for turn in turns if isinstance(turns, list) else ():
        role, content = said(turn, len(messages))
        if role == "system" and not messages:
            continue
        if role != ("user", "assistant")[len(messages) % 2] or not isinstance(content, str):
            break
        messages.append({"role": str(role), "content": content})
    return messages[: len(messages) - (len(messages) % 2 == 0)] if messages else []


def said(turn: Any, place: int) -> tuple[str | None, Any]:
    """Return a turn's role, if it is known, and its content of whatever type; place 0 is the user's."""
    if isinstance(turn, str):
        return ("user", "assistant")[place % 2], turn
    if not isinstance(turn, Mapping):
        return None, None
    return ROLES.get(str(turn.get("role", turn.get("from")))), turn.get("content", turn.get("value"))
