"""What lies between matrix products, in plain torch: kernels are held to it, and it serves without them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from drafter.model import causal, rms_norm, rotate

FEW = 2  # new tokens of a row that a kernel takes: one, or two after a draft that was accepted whole

Pair = tuple[Tensor, Tensor]  # keys and values
Attend = Callable[[int, Tensor], Tensor]  # (layer, qkv_nd) -> out_nd, [tokens, heads * head_dim]
Turn = Callable[[Tensor, "Heads", Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Heads:
    """How one layer's queries, keys and values come out of one matrix product, side by side.

    Attributes:
        count, kv_count, dim: query heads, key heads, and the size of either.
        q_weight, k_weight: of the norm of each head, [dim]; None where the model has none.
        eps: of these norms.
        cosine_pd, sine_pd: the rotary tables by position, float32.
    """

    count: int
    kv_count: int
    dim: int
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cosine_pd: Tensor
    sine_pd: Tensor


@dataclass(frozen=True)
class NewTokens:
    """Which tokens of a flat pass are whose: row r's stand at firsts[r] and on. All are int64, [rows].

    Attributes:
        firsts_b: where each row's new tokens begin.
        sizes_b: how many they are; 0 for a row that only fills up a batch.
        lengths_b: how many tokens of each row are cached: the new ones go behind them.
        slots_b: where in the cache each row is.
    """

    firsts_b: Tensor
    sizes_b: Tensor
    lengths_b: Tensor
    slots_b: Tensor

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """First, size, length and slot of each row that has new tokens."""
        columns = (self.firsts_b, self.sizes_b, self.lengths_b, self.slots_b)
        return [span for span in torch.stack(columns, 1).tolist() if span[1]]

    @cached_property
    def places_3n(self) -> Tensor:
        """Of each new token its place in the pass, its slot and its position."""
        parts = [
            torch.stack((torch.arange(first, first + size), torch.full((size,), slot),
                         torch.arange(length, length + size)))
            for first, size, length, slot in self.spans
        ]
        return torch.cat(parts, 1).to(self.slots_b.device)


def add_norm(x_nd: Tensor, branch_nd: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + branch, and its RMS norm."""
    if branch_nd is not None:
        x_nd = x_nd + branch_nd
    return x_nd, rms_norm(x_nd, weight_d, eps)


def product(x_nd: Tensor, weight_od: Tensor) -> Tensor:
    """Return x @ weight.T, [tokens, out]."""
    return functional.linear(x_nd, weight_od)


def gated(x_nd: Tensor, gate_up_md: Tensor) -> Tensor:
    """Return silu(gate) * up, where gate and up are x by the halves of a matrix."""
    gate_nw, up_nw = functional.linear(x_nd, gate_up_md).chunk(2, dim=1)
    return functional.silu(gate_nw) * up_nw


def turned(qkv_nd: Tensor, heads: Heads, positions_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalised if the model does and rotated, and values, [tokens, heads, dim]."""
    sizes = [heads.count, heads.kv_count, heads.kv_count]
    queries_nhd, keys_nkd, values_nkd = torch.split(qkv_nd.view(len(qkv_nd), -1, heads.dim), sizes, 1)
    if heads.q_weight is not None and heads.k_weight is not None:
        queries_nhd = rms_norm(queries_nhd, heads.q_weight, heads.eps)
        keys_nkd = rms_norm(keys_nkd, heads.k_weight, heads.eps)
    rotary = (heads.cosine_pd[positions_n][:, None], heads.sine_pd[positions_n][:, None])
    return rotate(queries_nhd, rotary), rotate(keys_nkd, rotary), values_nkd


def attend(qkv_nd: Tensor, heads: Heads, cached: Pair, new: NewTokens, turn: Turn = turned) -> Tensor:
    """Write new tokens of each row to the cache, and attend from them to all of their row up to themselves.

    It goes row by row over views of the cache, and looks at values, so that no graph can hold it.

    Args:
        qkv_nd: queries, keys and values of all new tokens, [tokens, (heads + 2 * kv_heads) * dim].
        heads: their shape.
        cached: keys and values of one layer, each [slots, kv_heads, columns, dim].
        new: whose the tokens are.
        turn: what normalises and rotates them.

    Returns:
        [tokens, heads * dim]; zeros for tokens that are nobody's.
    """
    (keys_skcd, values_skcd), (place_n, slot_n, position_n) = cached, new.places_3n
    positions_n = torch.zeros(len(qkv_nd), dtype=torch.int64, device=qkv_nd.device)
    positions_n[place_n] = position_n
    queries_nhd, keys_nkd, values_nkd = turn(qkv_nd, heads, positions_n)
    keys_skcd[slot_n, :, position_n] = keys_nkd[place_n]
    values_skcd[slot_n, :, position_n] = values_nkd[place_n]
    out_nhd = queries_nhd.new_zeros(queries_nhd.shape)
    for first, size, length, slot in new.spans:
        own = slice(first, first + size)
        known = slice(0, length + size)
        out_nhd[own] = _attended(queries_nhd[own], keys_skcd[slot, :, known], values_skcd[slot, :, known])
    return out_nhd.flatten(1)


def _attended(queries_thd: Tensor, keys_kcd: Tensor, values_kcd: Tensor) -> Tensor:
    """Attend from a row's last tokens to all of it up to themselves."""
    (size, _, dim), (kv_heads, context, _) = queries_thd.shape, keys_kcd.shape
    if size == context:
        return causal(queries_thd.transpose(0, 1)[None], keys_kcd[None], values_kcd[None])[0].transpose(0, 1)
    # The heads of a group share their keys: fold them into the token axis instead of copying keys.
    folded_kqd = queries_thd.view(size, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    visible_qc = None
    if size > 1:
        last_t1 = torch.arange(context - size, context, device=keys_kcd.device)[:, None]
        visible_tc = torch.arange(context, device=keys_kcd.device) <= last_t1
        visible_qc = visible_tc.repeat(folded_kqd.shape[1] // size, 1)[None]
    out_kqd = functional.scaled_dot_product_attention(
        folded_kqd[None], keys_kcd[None], values_kcd[None], attn_mask=visible_qc
    )[0]
    return out_kqd.view(kv_heads, -1, size, dim).permute(2, 0, 1, 3).flatten(1, 2)


def attend_one(queries_bhd: Tensor, new: Pair, cached: Pair, lengths_b: Tensor, context: int) -> Tensor:
    """Write one new token of each row to the cache, and attend from it to all of its row up to itself.

    All rows at once, in a shape that depends on no value: for generation without kernels.

    Args:
        queries_bhd: queries, [rows, heads, head_dim]; the heads of a group lie side by side.
        new: keys and values of the new tokens, each [rows, kv_heads, head_dim].
        cached: keys and values of one layer, each [at least rows, kv_heads, columns, head_dim].
        lengths_b: how many tokens of each row are cached: the new one goes to that column.
        context: more than any length; only so many columns are read.
    """
    (keys_bkcd, values_bkcd), rows = cached, len(queries_bhd)
    index_b = torch.arange(rows, device=lengths_b.device)
    keys_bkcd[index_b, :, lengths_b] = new[0]
    values_bkcd[index_b, :, lengths_b] = new[1]
    folded_bkgd = queries_bhd.reshape(rows, keys_bkcd.shape[1], -1, queries_bhd.shape[-1])
    visible_bc = torch.arange(context, device=lengths_b.device) <= lengths_b[:, None]
    visible_b1gc = visible_bc[:, None, None].expand(-1, -1, folded_bkgd.shape[2], -1)
    out_bkgd = functional.scaled_dot_product_attention(
        folded_bkgd, keys_bkcd[:rows, :, :context], values_bkcd[:rows, :, :context], attn_mask=visible_b1gc
    )
    return out_bkgd.flatten(1, 2)
