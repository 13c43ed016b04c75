"""The forward pass of inference: tokens lie flat, matrices that read the same input are joined, and on a GPU
kernels do what lies between the matrix products.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from drafter import plain
from drafter.model import Decoder, rotary_tables
from drafter.plain import Attend, Heads, NewTokens, Pair
from drafter.trial import trusted

ARRIVALS = 256  # as many as kernels.attention.PROGRAMS
# Not cuDNN's attention: it makes a plan for each new shape, 50 ms and more, and every prompt is a new shape.
READY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class _Layer:
    first_norm_d: Tensor
    qkv_od: Tensor
    heads: Heads
    out_do: Tensor
    second_norm_d: Tensor
    gate_up_md: Tensor
    down_dm: Tensor


class Inference:
    """A decoder that no longer learns.

    Its matrices of queries, keys and values, and those of gate and up, become parts of one: the decoder's own
    parameters are views of it, so that nothing is held twice.

    Args:
        decoder: the model, on its device and in its compute type.
        positions: tokens of the longest row.
    """

    def __init__(self, decoder: Decoder, positions: int) -> None:
        self.decoder, self.eps = decoder, decoder.config.rms_eps
        weight = decoder.head_weight
        self.device, self.dtype = weight.device, weight.dtype
        tables = rotary_tables(torch.arange(positions, device=self.device)[None], decoder.config)
        self.tables = (tables[0][0, 0], tables[1][0, 0])
        self.kernels = trusted(decoder.config, self.dtype, self.device)
        self.arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device=self.device)
        self.layers = [self._layer(layer) for layer in decoder.model.layers]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what has been joined leaves holes that nothing else fits

    def _layer(self, layer: Any) -> _Layer:
        own, mlp, config = layer.self_attn, layer.mlp, self.decoder.config
        norms = (own.q_norm, own.k_norm)
        q_weight, k_weight = (norm.weight.data if config.qk_norm else None for norm in norms)
        heads = Heads(config.heads, config.kv_heads, config.head_dim, q_weight, k_weight, config.rms_eps,
                      *self.tables)  # fmt: skip
        return _Layer(
            layer.input_layernorm.weight.data, joined([own.q_proj, own.k_proj, own.v_proj]), heads,
            own.o_proj.weight.data, layer.post_attention_layernorm.weight.data,
            joined([mlp.gate_proj, mlp.up_proj]), mlp.down_proj.weight.data,
        )

    def hidden(self, tokens_n: Tensor, attend: Attend) -> Tensor:
        """Return the normalised hidden states of a pass, [tokens, hidden]."""
        with sdpa_kernel(READY):
            return self._hidden(tokens_n, attend)

    def _hidden(self, tokens_n: Tensor, attend: Attend) -> Tensor:
        x_nd = functional.embedding(tokens_n, self.decoder.model.embed_tokens.weight)
        branch_nd: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x_nd, normed_nd = self._add_norm(x_nd, branch_nd, layer.first_norm_d)
            attended_no = attend(index, self._product(normed_nd, layer.qkv_od))
            branch_nd = self._product(attended_no, layer.out_do)
            x_nd, normed_nd = self._add_norm(x_nd, branch_nd, layer.second_norm_d)
            branch_nd = self._product(self._gated(normed_nd, layer.gate_up_md), layer.down_dm)
        return self._add_norm(x_nd, branch_nd, self.decoder.model.norm.weight)[1]

    def turned(self, layer: int, qkv_nd: Tensor, positions_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries and keys, normalised and rotated, and values, [tokens, heads, dim]."""
        turn = (self.kernels or plain).turned
        qkv_nd = whole(qkv_nd, self.dtype)
        found: tuple[Tensor, Tensor, Tensor] = turn(qkv_nd, self.layers[layer].heads, positions_n)
        return found

    def attend(self, cached: Pair, new: NewTokens, few: bool = True) -> Attend:
        """Return the attention of new tokens over slots.

        Args:
            cached: keys and values of all layers, each [layers, slots, kv_heads, columns, dim].
            new: whose the tokens are.
            few: whether there are at most `FEW` a row, so that a kernel can do it.
        """
        kernels = self.kernels

        def attended(index: int, qkv_nd: Tensor) -> Tensor:
            heads, own = self.layers[index].heads, (cached[0][index], cached[1][index])
            if kernels is not None and few:
                out_nd: Tensor = kernels.attend(qkv_nd, heads, own, new, self.arrived)
                return out_nd
            return plain.attend(whole(qkv_nd, self.dtype), heads, own, new, (kernels or plain).turned)

        return attended

    def _add_norm(self, x_nd: Tensor, branch_nd: Tensor | None, weight_d: Tensor) -> tuple[Tensor, Tensor]:
        return (self.kernels or plain).add_norm(x_nd, branch_nd, weight_d, self.eps)  # type: ignore[no-any-return]

    def _product(self, x_nd: Tensor, weight_od: Tensor) -> Tensor:
        # On a GPU it may be in parts, which attention or the next norm adds up.
        return (self.kernels or plain).product(x_nd, weight_od)  # type: ignore[no-any-return]

    def _gated(self, x_nd: Tensor, gate_up_md: Tensor) -> Tensor:
        return (self.kernels or plain).gated(x_nd, gate_up_md)  # type: ignore[no-any-return]


def whole(product_nd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product, [tokens, out], of which there may be only the parts."""
    return product_nd.sum(0).to(dtype) if product_nd.ndim == 3 else product_nd


def joined(parts: list[nn.Linear]) -> Tensor:
    """Return the weights of layers that read the same input as one, and make them views of it."""
    weights = [part.weight.data for part in parts]
    rows, columns = sum(map(len, weights)), weights[0].shape[1]
    if not all(_follows(left, right) for left, right in pairwise(weights)):
        views = torch.split(torch.cat(weights), [len(weight) for weight in weights])
        for part, view in zip(parts, views, strict=True):
            part.weight = nn.Parameter(view, requires_grad=part.weight.requires_grad)
        weights = list(views)
    return weights[0].as_strided((rows, columns), (columns, 1))


def _follows(left: Tensor, right: Tensor) -> bool:
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and left.data_ptr() + left.nbytes == right.data_ptr()
