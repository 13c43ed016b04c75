"""One plain decoder for Llama and Qwen3 shapes.

Parameter names are the ones transformers uses, so a checkpoint's tensors load by name. How tokens attend is
given to a layer from outside. Inference has a pass of its own over the same parameters: see inference.py.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter.config import ModelConfig

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class Attend(Protocol):
    """How the queries of one layer meet keys and values."""

    def __call__(self, queries_bhtd: Tensor, keys_bktd: Tensor, values_bktd: Tensor, /) -> Tensor:
        """Return the attended values, [batch, heads, tokens, head_dim]."""
        ...


def causal(queries_bhtd: Tensor, keys_bktd: Tensor, values_bktd: Tensor) -> Tensor:
    """Attend from each token to itself and those before it; right padding needs no mask."""
    groups = queries_bhtd.shape[1] // keys_bktd.shape[1]
    keys_bhtd = keys_bktd.repeat_interleave(groups, dim=1)
    values_bhtd = values_bktd.repeat_interleave(groups, dim=1)
    return functional.scaled_dot_product_attention(queries_bhtd, keys_bhtd, values_bhtd, is_causal=True)


class RmsNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension; the result has x's type."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32, of x's type."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen3 also normalises queries and keys by head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner, kv_inner = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.rms_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(config.head_dim, config.rms_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_btd: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the attention's contribution, [batch, tokens, hidden]."""
        heads = (*x_btd.shape[:2], -1, self.head_dim)
        queries_bhtd = self.q_norm(self.q_proj(x_btd).view(heads)).transpose(1, 2)
        keys_bktd = self.k_norm(self.k_proj(x_btd).view(heads)).transpose(1, 2)
        values_bktd = self.v_proj(x_btd).view(heads).transpose(1, 2)
        out_bhtd = attend(rotate(queries_bhtd, rotary), rotate(keys_bktd, rotary), values_bktd)
        return self.o_proj(out_bhtd.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The gated feed-forward of Llama: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Return the feed-forward's contribution, [batch, tokens, hidden]."""
        gated = functional.silu(self.gate_proj(x_btd)) * self.up_proj(x_btd)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_eps)
        self.mlp = Mlp(config)

    def forward(self, x_btd: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the residual stream after this layer."""
        x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), rotary, attend)
        return x_btd + self.mlp(self.post_attention_layernorm(x_btd))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Embedding, layers and final norm: what transformers keeps under `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_eps)


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """Return the normalised hidden states, [batch, tokens, hidden].

        Args:
            tokens_bt: token ids, [batch, tokens].
            positions_bt: each token's position in its own conversation, [batch, tokens] (batch may be 1).
        """
        x_btd = self.model.embed_tokens(tokens_bt)
        rotary = rotary_tables(positions_bt, self.config)
        for layer in self.model.layers:
            x_btd = layer(x_btd, rotary, causal)
        return self.model.norm(x_btd)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the vocabulary, [..., vocab], of normalised hidden states, [..., hidden]."""
        return functional.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix, [vocab, hidden]: the embedding itself where they are tied."""
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight


def rotary_tables(positions_bt: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [batch, 1, tokens, head_dim], float32 (RoPE, arXiv 2104.09864)."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions_bt.device).float() / config.head_dim
    angles = positions_bt[:, None, :, None].float() * (config.rope_theta**-exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_bhtd: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + head_dim/2) by its position's angle; the result has x's type."""
    cosine, sine = rotary
    low, high = x_bhtd.chunk(2, dim=-1)
    return (x_bhtd * cosine + torch.cat((-high, low), dim=-1) * sine).to(x_bhtd.dtype)


def build(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> Decoder:
    """Make a decoder for inference from named tensors; see `suited`.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape, or a tied head differs.
    """
    tensors = suited(config, tensors)
    with torch.device("meta"):
        decoder = Decoder(config)
    placed = {name: value.to(device=device, dtype=dtype) for name, value in tensors.items()}
    decoder.load_state_dict(placed, assign=True)
    return decoder.requires_grad_(False).eval()


def suited(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return just the tensors that a decoder of this shape has.

    A tied config may come with an output matrix as long as it equals the embedding; it is left out.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape, or a tied head differs.
    """
    tensors = dict(tensors)
    head = tensors.pop(HEAD, None) if config.tied else None
    with torch.device("meta"):
        decoder = Decoder(config)
    expected = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        raise ValueError(_difference(expected, found))
    if head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise ValueError(f"the config ties {HEAD} to {EMBEDDING}, but the two tensors differ")
    return tensors


def _difference(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> str:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return f"tensor {name}: expected shape {expected.get(name)}, found {found.get(name)}"
    raise AssertionError("no difference")
