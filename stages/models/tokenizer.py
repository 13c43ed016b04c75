"""The target's tokenizer and chat template, from a hub folder or out of a GGUF file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from gguf import GGUFReader
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stages.errors import UserError

Message = Mapping[str, str]
CONTROL = 3  # the GGUF's token type for special tokens


class Tokenizer:
    """Text to ids and back, and conversations to prompts. It never adds an id on its own."""

    def __init__(self, backend: PreTrainedTokenizerBase) -> None:
        self._backend = backend
        self._fast: Fast = backend.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._added: dict[int, AddedToken] = backend.added_tokens_decoder
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a turn, as the tokenizer itself names them (the profile has the last word)."""
        stop = self._backend.eos_token_id
        return () if stop is None else (int(stop),)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that stand for one id each, which no user text should hold.

        Not of special tokens alone: Qwen3's <think> and <tool_call> are added ones that are not special.
        """
        return tuple(token.content for _, token in sorted(self._added.items()) if token.content.strip())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; texts of special tokens become their ids."""
        return list(self._backend.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` does but many at once, on all cores."""
        found = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, as `decode` does but many at once, on all cores."""
        return list(self._fast.decode_batch([list(row) for row in rows], skip_special_tokens=False))

    def render(self, messages: Sequence[Message], **template_arguments: Any) -> str:
        """Return the chat template's text of a conversation, open for the assistant's answer."""
        text = self._backend.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False,
            **template_arguments,
        )
        return cast(str, text)

    def prompt(self, messages: Sequence[Message], **template_arguments: Any) -> list[int]:
        """Return the ids of a conversation, open for the assistant's answer."""
        return self.encode(self.render(messages, **template_arguments))


def load_tokenizer(folder: Path, format: Literal["gguf", "hub"]) -> Tokenizer:
    """Load the tokenizer that lies in a fetched source's folder.

    Raises:
        UserError: the folder has not the files of this format, or a GGUF of a kind that is not known here.
    """
    backend = _from_gguf(_single_gguf(folder)) if format == "gguf" else _from_hub(folder)
    if not backend.chat_template:
        raise UserError(f"{folder}: the tokenizer has no chat template; take an instruct model's source")
    return Tokenizer(backend)


def _from_hub(folder: Path) -> PreTrainedTokenizerBase:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: list it in lock/sources.toml, then make fetch")
    load: Any = AutoTokenizer.from_pretrained  # transformers' constructors carry no annotations
    return cast(PreTrainedTokenizerBase, load(folder, local_files_only=True, use_fast=True))


def _single_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UserError(f"{folder}: expected one .gguf file, found {names}")
    return found[0]


def _from_gguf(path: Path) -> PreTrainedTokenizerFast:
    """Build byte-level BPE from the file's own lists: transformers' reader adds an id and joins digits."""
    fields = GGUFReader(path).fields

    def value(key: str) -> Any:
        if key not in fields:
            raise UserError(f"{path}: the GGUF has no field {key}")
        return fields[key].contents()

    kind = (value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UserError(f"{path}: only the tokenizer ('gpt2', 'smollm') is known here, found {kind}")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    fast = Fast(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fast.decoder = decoders.ByteLevel()
    types = value("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrap: Any = PreTrainedTokenizerFast
    backend = wrap(tokenizer_object=fast, eos_token=tokens[value("tokenizer.ggml.eos_token_id")],
                   clean_up_tokenization_spaces=False)
    backend.chat_template = value("tokenizer.chat_template")
    return cast(PreTrainedTokenizerFast, backend)
