"""The tokenizer: what facts.md's transformers gets wrong is right here, and text survives the round trip."""

import itertools
import json
from pathlib import Path

import pytest
import regex
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from stages.errors import UserError
from stages.models.tokenizer import Tokenizer, load_tokenizer

AWKWARD = ["", " ", "\n\n1.", "In 2024, 1234567890 + 12.5 = ?", "naïve façade – “quotes”", "👩‍👩‍👧 🇵🇹 😀",
           "日本語の文章と한국어 и русский", "tabs\tand\r\nreturns", "  leading and trailing  ", "don't I'll",
           "def f(x):\n    return {x: [1, 22, 333]}\n", "\u0000\u200b\ufeff", "a" * 500, "١٢٣ ½ ²"]


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return load_tokenizer(smollm2_folder, "gguf")


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


# The vocabulary lacks a few bytes: control characters, and the first bytes of planes without letters.
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"]), max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


class Reference:
    """Byte-level BPE written out: lowest-ranked pair first, digits apart. Slow and plain."""

    PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, path: Path) -> None:
        fields = GGUFReader(path).fields
        self.ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        self.letters = {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        pieces = [piece for part in parts for piece in self.PIECES.findall(part)]
        return [self.ids[token] for piece in pieces for token in self._merged(piece)]

    def _merged(self, piece: str) -> list[str]:
        tokens = [self.letters[byte] for byte in piece.encode()]
        while len(tokens) > 1:
            pairs = [self.ranks.get(pair, 1 << 30) for pair in itertools.pairwise(tokens)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == 1 << 30:
                break
            tokens[best : best + 2] = [tokens[best] + tokens[best + 1]]
        return tokens


def test_ids_are_those_of_a_plain_reference(tokenizer: Tokenizer, smollm2_folder: Path) -> None:
    reference = Reference(next(smollm2_folder.glob("*.gguf")))
    for text in AWKWARD:
        assert tokenizer.encode(text) == reference.encode(text), text


def test_nothing_is_put_in_front_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("12345")
    assert len(ids) == 5
    assert not set(ids) & tokenizer.special_ids


def test_prompt_is_the_template_with_special_ids(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi 42"}, {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Bye"}]
    ids = tokenizer.prompt(messages)
    assert tokenizer.decode(ids) == tokenizer.render(messages)
    assert tokenizer.render(messages).endswith("<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 5, 4)
    assert tokenizer.stop_ids == (2,)
    assert set(tokenizer.special_texts) >= {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_hub_folder_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save_pretrained(tmp_path)
    hub = load_tokenizer(tmp_path, "hub")
    messages = [{"role": "user", "content": "What is 17 * 3?\n\n1. 51"}]
    assert hub.prompt(messages) == tokenizer.prompt(messages)
    assert hub.special_ids == tokenizer.special_ids


def test_added_tokens_that_are_not_special_are_no_users_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save_pretrained(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("   ", special=False)])
    backend.save_pretrained(tmp_path)
    hub = load_tokenizer(tmp_path, "hub")
    (think,) = hub.encode("<think>")
    assert think not in hub.special_ids
    assert set(hub.special_texts) == {*tokenizer.special_texts, "<think>"}


def test_template_arguments_reach_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{% if shout %}!{% endif %}")
    hub = load_tokenizer(tmp_path, "hub")
    assert hub.render([{"role": "user", "content": "ho"}], shout=True) == "ho!"


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected one \.gguf file, found none"):
        load_tokenizer(tmp_path, "gguf")
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path, "hub")


def test_a_tokenizer_without_chat_template_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(tmp_path, "hub")
