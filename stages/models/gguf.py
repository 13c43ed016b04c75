"""GGUF: a target's shape and weights out of one file of llama.cpp's format."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from drafter.config import ModelConfig
from drafter.model import EMBEDDING, HEAD

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": EMBEDDING, "output_norm": "model.norm.weight", "output": HEAD}


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a Llama model: its shape, and its tensors dequantised to float32 under transformers' names.

    Raises:
        ValueError: not a GGUF file, not a plain Llama, or a tensor that has no place or an unknown type.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{path}: not a whole GGUF file ({error})") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, reader, tied="output.weight" not in stored)
    tensors = {}
    for name, tensor in stored.items():
        try:
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        except NotImplementedError as error:
            raise ValueError(f"{path}: tensor {name} is stored in an unsupported type ({error})") from error
        if name.endswith("attn_q.weight"):
            weight = _unpermute(weight, config.heads)
        if name.endswith("attn_k.weight"):
            weight = _unpermute(weight, config.kv_heads)
        tensors[_rename(path, name)] = weight
    return config, tensors


def _config(path: Path, reader: GGUFReader, tied: bool) -> ModelConfig:
    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        if field is None and default is None:
            raise ValueError(f"{path}: the GGUF header lacks {key}")
        return default if field is None else field.contents()

    if value("general.architecture") != "llama":
        raise ValueError(f"{path}: holds a {value('general.architecture')!r} model; llama is supported")
    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    head_dim = value("llama.attention.key_length", hidden // heads)
    scaling = value("llama.rope.scaling.type", "none")
    if scaling != "none" or value("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path}: scaled or partial RoPE is not supported")
    return ModelConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=value("llama.feed_forward_length"),
        layers=value("llama.block_count"),
        heads=heads,
        kv_heads=value("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=float(value("llama.rope.freq_base", 10_000)),
        # The header keeps float32: this is the number that was meant.
        rms_eps=float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        tied=tied,
        qk_norm=False,
    )


def _rename(path: Path, name: str) -> str:
    base = name.removesuffix(".weight")
    if base in TOP_NAMES:
        return TOP_NAMES[base]
    match base.split("."):
        case ["blk", index, part] if part in NAMES:
            return f"model.layers.{index}.{NAMES[part]}.weight"
    raise ValueError(f"{path}: tensor {name} has no place in a Llama")


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k: pairs (2i, 2i+1) back to (i, i + head_dim/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
