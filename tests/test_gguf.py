"""GGUF: what llama.cpp's format holds of a model comes back as transformers had it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_config, small_decoder
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize

from drafter.config import ModelConfig
from drafter.model import HEAD, build
from stages.errors import UserError
from stages.models.gguf import read_gguf
from stages.models.target import load_target, read_model
from stages.models.tokenizer import load_tokenizer

CONFIG = small_config("llama", tied=False)
F32 = GGMLQuantizationType.F32
PLACES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
          "post_attention_layernorm": "ffn_norm"}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FIELDS: dict[str, Any] = {
    "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "attention.head_count": 4,
    "attention.head_count_kv": 2, "rope.freq_base": 10_000.0, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def place(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PLACES[part]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: of each head, the rows i and i + head_dim / 2 stand side by side."""
    size = len(weight) // heads
    pairs = [(i, i + size // 2) for i in range(size // 2)]
    return weight[[head * size + row for head in range(heads) for pair in pairs for row in pair]]


def write(path: Path, tensors: dict[str, torch.Tensor], kind: GGMLQuantizationType = F32,
          architecture: str = "llama", words: int = 97, **fields: Any) -> Path:  # fmt: skip
    """Write a GGUF file the way llama.cpp's converter lays a Llama out; a field of None is left out."""
    writer = GGUFWriter(path, architecture)
    writer.add_token_list([f"word{i}" for i in range(words)])
    for key, value in (FIELDS | {name.replace("__", "."): value for name, value in fields.items()}).items():
        if isinstance(value, str):
            writer.add_string(f"llama.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"llama.{key}", value)
        elif value is not None:
            writer.add_uint32(f"llama.{key}", value)
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, CONFIG.heads if "q_proj" in name else CONFIG.kv_heads)
        if array.ndim == 2:
            writer.add_tensor(place(name), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(place(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights(tied: bool = False) -> dict[str, torch.Tensor]:
    """Random weights of half precision, so that every float type of GGUF holds them exactly."""
    state = small_decoder("llama", seed=61, tied=tied).state_dict()
    return {name: tensor.bfloat16().half().float() for name, tensor in state.items()}


@pytest.mark.parametrize("kind", [F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
@pytest.mark.parametrize("tied", [True, False])
def test_what_was_written_is_read(tmp_path: Path, kind: GGMLQuantizationType, tied: bool) -> None:
    expected = weights(tied)
    if kind == GGMLQuantizationType.BF16:
        expected = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
    config, tensors = read_gguf(write(tmp_path / "a.gguf", expected, kind))
    assert config == small_config("llama", tied=tied)
    assert tensors.keys() == expected.keys()
    assert (HEAD in tensors) != tied
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name])


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    expected = weights()
    _, tensors = read_gguf(write(tmp_path / "a.gguf", expected, GGMLQuantizationType.Q8_0))
    for name, tensor in tensors.items():
        if tensor.ndim == 2:  # Q8_0: groups of 32 with steps of a 127th of the largest, in half precision
            steps = expected[name].reshape(-1, 32).abs().amax(-1, keepdim=True) / 127
            off = (tensor - expected[name]).reshape(-1, 32).abs()
            assert (off <= 0.5 * steps + 1e-3 * 127 * steps).all()
            assert off.any()
        else:
            assert torch.equal(tensor, expected[name])


def test_a_gguf_target_gives_the_same_logits(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", weights())
    read = load_target(tmp_path, "gguf", "float32", "cpu")
    own = build(CONFIG, weights(), torch.float32, "cpu")
    tokens, positions = torch.arange(20)[None], torch.arange(20)[None]
    assert torch.equal(read(tokens, positions), own(tokens, positions))


def test_what_a_header_may_leave_out(tmp_path: Path) -> None:
    """llama.cpp takes as many key heads as heads, and a base of 10,000, where a file says nothing."""
    state = small_decoder("llama", seed=61).state_dict()
    path = write(tmp_path / "a.gguf", state, attention__head_count_kv=None, rope__freq_base=None)
    config, _ = read_gguf(path)
    assert (config.kv_heads, config.rope_theta) == (4, 10_000.0)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.layer_norm_rms_epsilon"])
def test_a_header_without_a_size_is_refused_by_key(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "a.gguf", weights(), **{key.replace(".", "__"): None})
    with pytest.raises(ValueError, match=f"{path}.*lacks llama.{key}"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"architecture": "qwen3"}, "qwen3"), ({"rope__scaling__type": "linear"}, "RoPE"),
     ({"rope__scaling__type": "yarn"}, "RoPE"), ({"words": 96}, "expected shape .96, 64"),
     ({"block_count": 3}, "model.layers.2"), ({"block_count": 1}, "model.layers.1"),
     ({"rope__dimension_count": 8}, "RoPE"), ({"attention__key_length": 32}, "q_proj|k_proj|o_proj")],
)  # fmt: skip
def test_another_model_than_a_plain_llama_is_refused(tmp_path: Path, change: dict, said: str) -> None:
    write(tmp_path / "a.gguf", weights(), **change)
    with pytest.raises(UserError, match=f"{tmp_path}.*({said})"):
        read_model(tmp_path, "gguf")


def test_plain_rope_may_be_spelled_out(tmp_path: Path) -> None:
    assert read_gguf(write(tmp_path / "a.gguf", weights(), rope__scaling__type="none"))[0] == CONFIG


@pytest.mark.parametrize("extra", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(
    tmp_path: Path, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOP, "extra", extra.removesuffix(".weight"))
    monkeypatch.setattr(f"{__name__}.place", lambda name, old=place: extra if name == "extra" else old(name))
    write(tmp_path / "a.gguf", weights() | {"extra": torch.ones(8)})
    with pytest.raises(UserError, match=f"a.gguf.*{extra}"):
        read_model(tmp_path, "gguf")


def test_a_file_cut_anywhere_or_replaced_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", weights())
    whole = path.read_bytes()
    start = GGUFReader(path).data_offset
    cuts = [0, 1, 4, 8, 20, 24, *range(30, start, start // 25), start - 1, start, start + 1, len(whole) - 1]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 98362432\n"
    counts = whole[:8] + b"\xff" * 16 + whole[24:]
    for content in [*(whole[:cut] for cut in cuts), pointer, b"\0" * 5000, b"<html>" * 99, counts]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path}.*run `make fetch`"):
            read_model(tmp_path, "gguf")
    path.write_bytes(whole)
    assert read_model(tmp_path, "gguf")[0] == CONFIG


def test_a_type_that_cannot_be_dequantised_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(["a"])
    for key, value in FIELDS.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"a.gguf.*token_embd.weight.*I32"):
        read_model(tmp_path, "gguf")


def test_one_gguf_file_is_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected one \*.gguf, found 0; run `make fetch`"):
        read_model(tmp_path, "gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="found 2"):
        read_model(tmp_path, "gguf")


def test_the_real_target_reads_english(smollm2_folder: Path) -> None:
    config, tensors = read_model(smollm2_folder, "gguf")
    assert config == ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, layers=30, heads=9, kv_heads=3,
        head_dim=64, rope_theta=100_000.0, rms_eps=1e-5, tied=True, qk_norm=False,
    )  # fmt: skip
    target = build(config, tensors, torch.float32, "cpu")
    text = (
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April, "
        "May, June, July, August, September, October, November, December."
    )
    tokens_1t = torch.tensor([load_tokenizer(smollm2_folder, "gguf").encode(text)])
    with torch.inference_mode():
        logits_tv = target.logits(target(tokens_1t, torch.arange(tokens_1t.shape[1])[None]))[0]
    nats = torch.nn.functional.cross_entropy(logits_tv[:-1], tokens_1t[0, 1:])
    assert nats < 1.5  # it is 0.97; with the rows of q and k left as they are stored, 2.97
