"""What a list of known bases would get: bits a weight by layers kept, from shapes alone."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from drafter.config import ModelConfig
from drafter.model import Decoder

HEADER_BYTES = 260  # a tensor's share of the header, about


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=mlp, layers=layers, heads=heads, kv_heads=8,
        head_dim=128, rope_theta=1e6, rms_eps=1e-6, tied=tied, qk_norm=True,
    )  # fmt: skip


BASES = {
    "SmolLM2-135M": ModelConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, layers=30, heads=9, kv_heads=3,
        head_dim=64, rope_theta=1e5, rms_eps=1e-5, tied=True, qk_norm=False,
    ),
    "Qwen3-0.6B": _qwen3(28, 1_024, 3_072, 16),
    "Qwen3-1.7B": _qwen3(28, 2_048, 6_144, 16),
    "Qwen3-4B": _qwen3(36, 2_560, 9_728, 32),
    "Qwen3-8B": _qwen3(36, 4_096, 12_288, 32, tied=False),
}  # fmt: skip


def weight_count(config: ModelConfig) -> int:
    """Return how many weights a decoder of this shape has."""
    return sum(one.numel() for one in _shapes(config))


def bits_per_weight(config: ModelConfig, allotment_bytes: int) -> float:
    """Return the bits a matrix weight gets when norms, steps and header are paid; below 0: none is left."""
    matrices = sum(one.numel() for one in _shapes(config) if one.ndim == 2)
    return (allotment_bytes - overhead_bytes(config)) * 8 / matrices


def overhead_bytes(config: ModelConfig) -> int:
    """Return the bytes of norms, steps and header, about."""
    return sum(2 * len(one) + HEADER_BYTES for one in _shapes(config))


def table(allotment_bytes: int) -> Iterator[tuple[str, int, int, float]]:
    """Yield base, layers kept, weights and bits a weight, for each base in sixths of its depth."""
    for name, config in BASES.items():
        counts = sorted({max(1, round(config.layers * sixth / 6)) for sixth in range(1, 7)}, reverse=True)
        for layers in counts:
            kept = config.with_layers(layers)
            yield name, layers, weight_count(kept), bits_per_weight(kept, allotment_bytes)


def _shapes(config: ModelConfig) -> list[torch.Tensor]:
    """Parameters on the meta device; one layer is made, and counted as often as there are layers."""
    with torch.device("meta"):
        named = list(Decoder(replace(config, layers=1)).state_dict().items())
    layer = [value for name, value in named if ".layers." in name]
    return [value for name, value in named if ".layers." not in name] + layer * config.layers
