"""Evaluation conversations: dev for choosing, examples for reporting; never for training."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import read_jsonl
from stages.models.tokenizer import Tokenizer
from stages.profile import Target
from stages.sources.turns import said

SETS = ("dev", "examples")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """One conversation of an evaluation set.

    Attributes:
        texts: the contents of its messages, without any system prompt.
        prompt: its templated ids.
        continuation: the target's ids, where the file gives them.
    """

    id: str
    category: str
    texts: tuple[str, ...]
    prompt: tuple[int, ...]
    continuation: tuple[int, ...] | None

    def row(self, source: str) -> dict[str, Any]:
        """Return the prompt row as it is written."""
        row = {"id": self.id, "category": self.category, "source": source, "family": self.id,
               "prompt": list(self.prompt)}
        return row if self.continuation is None else row | {"continuation": list(self.continuation)}


def read_set(root: Path, name: str, tokenizer: Tokenizer, target: Target) -> list[Conversation]:
    """Read examples/NAME.jsonl: each line has id, category, and messages or prompt ids.

    Raises:
        UserError: the file is missing or empty, a line has neither, an id occurs twice, or a prompt is
            longer than the target's limit; the text names the file and the id.
    """
    path = root / "examples" / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path} is missing: it holds the conversations that every build is judged on")
    try:
        found = [_conversation(row, path, tokenizer, target) for row in read_jsonl(path)]
    except ValueError as error:
        raise UserError(str(error)) from error
    if not found:
        raise UserError(f"{path}: no conversation in it")
    if len({conversation.id for conversation in found}) < len(found):
        raise UserError(f"{path}: an id occurs twice")
    return found


def read_texts(path: Path, tokenizer: Tokenizer, target: Target) -> Iterator[tuple[str, ...]]:
    """Yield the message texts of a JSON-lines file: `messages`, `prompt` (text or ids) or `text`.

    Raises:
        UserError: the file is missing, or a line has none of these.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing: data.decontaminate names it")
    try:
        for number, row in enumerate(read_jsonl(path), 1):
            texts = _texts(row, tokenizer, target)
            if texts is None:
                raise UserError(f"{path}, line {number}: needs messages with their texts, prompt or text")
            yield texts
    except ValueError as error:
        raise UserError(str(error)) from error


def _texts(row: Any, tokenizer: Tokenizer, target: Target) -> tuple[str, ...] | None:
    match row:
        case {"messages": list(messages)}:
            turns = [said(turn, place) for place, turn in enumerate(messages)]
            texts = tuple(content for role, content in turns if role != "system")
            return texts if all(isinstance(text, str) for text in texts) else None
        case {"prompt": str(text)} | {"text": str(text)}:
            return (text,)
        case {"prompt": list(ids)} if _are_ids(ids):
            return tuple(texts_of(ids, tokenizer, target))
    return None


def _conversation(row: Any, path: Path, tokenizer: Tokenizer, target: Target) -> Conversation:
    where = f"{path}, conversation {row.get('id') if isinstance(row, dict) else row!r}"
    match row:
        case {"id": name, "category": str(category), "messages": list(messages)} if _are_messages(messages):
            prompt = tokenizer.prompt(messages, **target.template_arguments)
            texts = [message["content"] for message in messages if message["role"] != "system"]
        case {"id": name, "category": str(category), "prompt": list(prompt)} if _are_ids(prompt):
            texts = texts_of(prompt, tokenizer, target)
        case _:
            raise UserError(f"{where}: needs id, category, and messages (each with role and content) or "
                            "prompt ids")
    continuation = row.get("continuation")
    if continuation is not None and not (isinstance(continuation, list) and _are_ids(continuation)):
        raise UserError(f"{where}: continuation takes a list of ids")
    if continuation:
        texts.append(tokenizer.decode([i for i in continuation if i not in tokenizer.special_ids]))
    if len(prompt) > target.max_prompt_tokens:
        raise UserError(f"{where}: {len(prompt)} prompt tokens, more than target.max_prompt_tokens "
                        f"({target.max_prompt_tokens})")
    return Conversation(str(name), category, tuple(texts), tuple(prompt),
                        None if continuation is None else tuple(continuation))


def _are_messages(found: list[Any]) -> bool:
    return bool(found) and all(isinstance(one, dict) and one.get("role") in ROLES
                               and isinstance(one.get("content"), str) for one in found)


def _are_ids(found: list[Any]) -> bool:
    return all(type(one) is int for one in found)


def texts_of(prompt: list[int], tokenizer: Tokenizer, target: Target) -> list[str]:
    """Return the message texts inside templated ids, without the template's own words and a system prompt."""
    frame = tokenizer.prompt([{"role": "user", "content": "."}], **target.template_arguments)
    own = set(_segments(frame, tokenizer))
    return [text for text in _segments(prompt, tokenizer) if text not in own]


def _segments(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Return what stands between special tokens, but the names of roles and what is the system's.

    A role is named by a line of its own, before its message or as all that stands before a special token.
    """
    runs: list[list[int]] = [[]]
    for index in ids:
        if index in tokenizer.special_ids:
            runs.append([])
        else:
            runs[-1].append(index)
    texts, role = [], ""
    for whole in (tokenizer.decode(run).strip() for run in runs if run):
        first, _, rest = whole.partition("\n")
        named = first.strip() in ROLES
        role, text = (first.strip(), rest.strip()) if named else (role, whole)
        if text and role != "system":
            texts.append(text)
        role = "" if text else role
    return texts
