"""Models of random weights for the benchmarks: ours, and transformers' own of the same shape."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafter.config import ModelConfig
from drafter.model import Decoder
from stages.bits.bases import BASES

COPIED_BYTES = 2**31


SHAPES = {name.lower(): config for name, config in BASES.items() if config.qk_norm} | {
    "toy": ModelConfig(vocab_size=997, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2,
                       head_dim=16, rope_theta=1e4, rms_eps=1e-6, tied=True, qk_norm=True),
}


def device_and_dtype() -> tuple[str, torch.dtype]:
    """Return where a benchmark runs and in which type: bfloat16 on a GPU, else float32."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def random_decoder(config: ModelConfig) -> Decoder:
    """Return our decoder with random weights."""
    device, dtype = device_and_dtype()
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    for weight in decoder.requires_grad_(False).parameters():
        weight.normal_(std=0.02) if weight.ndim == 2 else weight.fill_(1.0)
    return decoder.eval()


def transformers_config(config: ModelConfig, **more: Any) -> Any:
    """Return a Qwen3 or Llama shape as transformers has it."""
    import transformers  # noqa: PLC0415 - seconds, and not every run compares

    kind = transformers.Qwen3Config if config.qk_norm else transformers.LlamaConfig
    return kind(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, head_dim=config.head_dim,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_eps, tie_word_embeddings=config.tied, max_position_embeddings=4_096, **more,
    )  # fmt: skip


def random_transformers(config: ModelConfig) -> Any:
    """Return transformers' own model of a Qwen3 or Llama shape with random weights."""
    import transformers  # noqa: PLC0415

    device, dtype = device_and_dtype()
    model_class = transformers.Qwen3ForCausalLM if config.qk_norm else transformers.LlamaForCausalLM
    settings = transformers_config(config, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_class(settings).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def generate(model: Any, requests: list[list[int]], count: int, stops: tuple[int, ...] = (),
             static: bool = False) -> Tensor:
    """Return greedy ids for each request, [rows, count]: left-padded, dynamic cache, or a static one.

    With stop ids it may be fewer columns, and what follows a stop in a row is padding. transformers compiles
    the steps over a static cache on a GPU.
    """
    width, device = max(map(len, requests)), model.device
    padded = torch.tensor([[0] * (width - len(request)) + request for request in requests], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in requests], device=device)
    more: dict[str, Any] = {"eos_token_id": list(stops)} if stops else {"min_new_tokens": count}
    if static:
        more["cache_implementation"] = "static"
    out: Tensor = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=count, **more)
    return out[:, width:]


def weight_bytes(decoder: Decoder) -> int:
    """Return the bytes that one token's pass reads of the weights; of an untied embedding next to nothing."""
    skipped = 0 if decoder.config.tied else decoder.model.embed_tokens.weight.nbytes
    return sum(weight.nbytes for weight in decoder.parameters()) - skipped


def token_bytes(config: ModelConfig) -> int:
    """Return the bytes of one token's keys and values."""
    return 2 * config.layers * config.kv_heads * config.head_dim * device_and_dtype()[1].itemsize


def copy_rate() -> float:
    """Return bytes read and written per second by a large copy on the device, the best of five."""
    device = device_and_dtype()[0]
    size = COPIED_BYTES if device == "cuda" else COPIED_BYTES >> 5
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(5))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes on the device, after what was going on there."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Return the most device memory that was in use at once; 0 without a GPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0


def clear() -> None:
    """Give memory back, and forget its peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
