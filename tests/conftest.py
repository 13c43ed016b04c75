"""What many tests share: the real small target, fetched once, and small models of both families."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from drafter.config import ModelConfig
from drafter.model import Decoder

ROOT = Path(__file__).resolve().parent.parent

# A busy machine may stop any example for a while; what is too slow is a bench's to tell.
settings.register_profile("draftmill", deadline=None)
settings.load_profile("draftmill")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of the real SmolLM2 GGUF, fetched as `make fetch` would where it is not there yet."""
    command = [sys.executable, "-m", "stages.run", "fetch", "--profile", "smollm2"]
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / "vendor" / "smollm2-135m-instruct"


def small_config(family: str = "llama", layers: int = 2, tied: bool = True) -> ModelConfig:
    """A small shape: grouped queries, and for Qwen3 a head_dim that is not hidden / heads."""
    return ModelConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, layers=layers, heads=4, kv_heads=2,
        head_dim=32 if family == "qwen3" else 16, rope_theta=10_000.0, rms_eps=1e-6, tied=tied,
        qk_norm=family == "qwen3",
    )  # fmt: skip


def small_decoder(family: str = "llama", seed: int = 0, layers: int = 2, tied: bool = True) -> Decoder:
    """A decoder of random weights, spread out so that its greedy choices are no near-ties."""
    torch.manual_seed(seed)
    decoder = Decoder(small_config(family, layers, tied))
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.4 if "embed" in name or "lm_head" in name else 0.15)
            else:
                weight.uniform_(0.5, 1.5)
    return decoder.requires_grad_(False).eval()
