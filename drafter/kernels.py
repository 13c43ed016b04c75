"""Triton kernels for a GPU. Each has a plain torch counterpart that a test holds it to."""

# ruff: noqa: N803, PLR0915, PLR0917 - a kernel has upper-case constants, many arguments and no parts

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.plain import FEW, Heads, NewTokens, Pair

TILE_ROWS = 16   # the least that a matrix product takes: queries that share a key head are padded to it
COLUMNS = 32     # of the cache, read at a time
WARPS = 4
STAGES = 3       # blocks of columns that are on their way at a time
PROGRAMS = 256   # of one attention: rows are split over their context until there are so many ...
SPLITS = 16      # ... but no finer than this
GATED = 1024     # elements of a gate that one program does


@triton.jit
def _norm(x, branch, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    # One program adds to one token's residual, in place, and normalises it. All are contiguous.
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    real = column < SIZE
    place = row.to(tl.int64) * SIZE + column
    value = tl.load(x + place, mask=real, other=0.0)
    if ADD:
        more = tl.load(branch + place, mask=real, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + place, value, mask=real)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    scaled = wide * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, scaled.to(value.dtype), mask=real)


def add_norm(x_nd: Tensor, branch_nd: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + branch, which x becomes, and its RMS norm."""
    rows, size = x_nd.shape
    out_nd = torch.empty_like(x_nd)
    block = triton.next_power_of_2(size)
    added_nd = x_nd if branch_nd is None else branch_nd
    _norm[(rows,)](x_nd, added_nd, weight_d, out_nd, eps, SIZE=size, BLOCK=block, ADD=branch_nd is not None,
                   num_warps=8 if block > 1024 else 4)  # fmt: skip
    return x_nd, out_nd


@triton.jit
def _gate(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * SIZE + column, silu * up, mask=real)


def gated(gate_up_nd: Tensor) -> Tensor:
    """Return silu(gate) * up, where gate and up are the halves of a row."""
    rows, size = gate_up_nd.shape[0], gate_up_nd.shape[1] // 2
    out_nd = gate_up_nd.new_empty(rows, size)
    _gate[(rows, triton.cdiv(size, GATED))](gate_up_nd, out_nd, SIZE=size, BLOCK=GATED)
    return out_nd


@triton.jit
def _turned(place, real, weight, position, cosine, sine, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    # Normalise, where the model does, and rotate one head a line; `place` is where each begins.
    half: tl.constexpr = DIM // 2
    dim = tl.arange(0, DIM)
    other = (dim + half) % DIM
    real = real[:, None]
    x = tl.load(place[:, None] + dim[None, :], mask=real, other=0.0)
    y = tl.load(place[:, None] + other[None, :], mask=real, other=0.0)
    kind = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        rate = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = (x * rate * tl.load(weight + dim).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        y = (y * rate * tl.load(weight + other).to(tl.float32)[None, :]).to(kind).to(tl.float32)
    at = position[:, None] * DIM + dim[None, :]
    cos, sin = tl.load(cosine + at, mask=real, other=0.0), tl.load(sine + at, mask=real, other=0.0)
    return (x * cos + tl.where(dim < half, -y, y) * sin).to(kind)


@triton.jit
def _turn(qkv, q_weight, k_weight, positions, cosine, sine, out, eps, HEADS: tl.constexpr,
          KV_HEADS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr):
    # One program turns all heads of one token.
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, TILE), tl.arange(0, DIM)
    position = tl.load(positions + token) + head * 0
    query, key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    from_ = qkv + token * (HEADS + 2 * KV_HEADS) * DIM + head * DIM
    to = out + token * (HEADS + KV_HEADS) * DIM + (head * DIM)[:, None] + dim[None, :]
    tl.store(to, _turned(from_, query, q_weight, position, cosine, sine, eps, DIM, NORM), mask=query[:, None])
    tl.store(to, _turned(from_, key, k_weight, position, cosine, sine, eps, DIM, NORM), mask=key[:, None])


def turned(qkv_nd: Tensor, heads: Heads, positions_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalised and rotated, and values; see `plain.turned`."""
    count, (query, key, dim) = len(qkv_nd), (heads.count, heads.kv_count, heads.dim)
    out_nhd = qkv_nd.new_empty(count, query + key, dim)
    _turn[(count,)](qkv_nd, *_weights(heads), positions_n, heads.cosine_pd, heads.sine_pd, out_nhd, heads.eps,
                    HEADS=query, KV_HEADS=key, TILE=triton.next_power_of_2(query + key), DIM=dim,
                    NORM=heads.q_weight is not None)  # fmt: skip
    values_nkd = qkv_nd.view(count, -1, dim)[:, query + key :]
    return out_nhd[:, :query], out_nhd[:, query:], values_nkd


def _weights(heads: Heads) -> tuple[Tensor, Tensor]:
    # A kernel that does not normalise reads neither.
    nothing = heads.cosine_pd
    return (nothing if heads.q_weight is None else heads.q_weight,
            nothing if heads.k_weight is None else heads.k_weight)


@triton.jit(do_not_specialize=["splits"])
def _attend(qkv, q_weight, k_weight, cosine, sine, keys, values, firsts, sizes, lengths, slots, out, mixes,
            stats, arrived, splits, eps, scale, stride_slot, stride_head, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, NEW: tl.constexpr,
            BLOCK: tl.constexpr, MOST: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr):
    # One program attends from a row's new tokens, by the query heads that share a key head, to one part of
    # the row's context; the first part has the new tokens themselves. Whichever of a row's parts is done last
    # puts them together, all at once and always in the same order.
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    first, size = tl.load(firsts + row), tl.load(sizes + row)
    length, slot = tl.load(lengths + row), tl.load(slots + row).to(tl.int64)
    line, dim, column = tl.arange(0, TILE), tl.arange(0, DIM), tl.arange(0, BLOCK)
    token, query_head = line // group, head * group + line % group
    real = token < size
    query = _turned(qkv + (first + token) * width + query_head * DIM, real, q_weight, length + token, cosine,
                    sine, eps, DIM, NORM)
    cached = slot * stride_slot + head.to(tl.int64) * stride_head
    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, DIM), tl.float32)
    if part == 0:
        new = tl.arange(0, NEW)
        fresh = new < size
        key_place = qkv + (first + new) * width + (HEADS + head) * DIM
        new_key = _turned(key_place, fresh, k_weight, length + new, cosine, sine, eps, DIM, NORM)
        value_place = key_place[:, None] + KV_HEADS * DIM + dim[None, :]
        new_value = tl.load(value_place, mask=fresh[:, None], other=0.0)
        place = cached + (length + new)[:, None] * DIM + dim[None, :]
        tl.store(keys + place, new_key, mask=fresh[:, None])
        tl.store(values + place, new_value, mask=fresh[:, None])
        scores = tl.dot(query, tl.trans(new_key), input_precision="ieee") * scale
        scores = tl.where(new[None, :] <= token[:, None], scores, float("-inf"))
        best = tl.max(scores, axis=1)
        weights = tl.exp(scores - best[:, None])
        total = tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(new_value.dtype), new_value, input_precision="ieee")
    span = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    for start in range(part * span, tl.minimum(length, part * span + span), BLOCK):
        used = start + column < length
        place = cached + (start + column)[:, None] * DIM + dim[None, :]
        key = tl.load(keys + place, mask=used[:, None], other=0.0)
        value = tl.load(values + place, mask=used[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(used[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        weights, kept = tl.exp(scores - better[:, None]), tl.exp(best - better)
        total = total * kept + tl.sum(weights, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = better
    if MOST > 1:
        own = row * KV_HEADS + head
        mix_place = (own * splits + part) * LINES * DIM + line[:, None] * DIM + dim[None, :]
        tl.store(mixes + mix_place, mixed, mask=(line < LINES)[:, None])
        stat_place = stats + (own * splits + part) * 2 * LINES + line
        tl.store(stat_place, best, mask=line < LINES)
        tl.store(stat_place + LINES, total, mask=line < LINES)
        tl.debug_barrier()
        if tl.atomic_add(arrived + own, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            other, few = tl.arange(0, MOST)[:, None], tl.arange(0, LINES)[None, :]
            stat = stats + (own * splits + other) * 2 * LINES + few
            made = (other < splits) & (few < LINES)
            bests = tl.load(stat, mask=made, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(stat + LINES, mask=made, other=0.0, cache_modifier=".cg")
            part_place = ((own * splits + other) * LINES + few)[:, :, None] * DIM + dim[None, None, :]
            parts = tl.load(mixes + part_place, mask=made[:, :, None], other=0.0, cache_modifier=".cg")
            # The first part has seen a token, so there is a finite best.
            kept = tl.exp(bests - tl.max(bests, axis=0)[None, :])
            whole = tl.sum(totals * kept, axis=0)
            mean = tl.sum(parts * kept[:, :, None], axis=0) / whole[:, None]
            few = tl.arange(0, LINES)
            to = (first + few // group) * HEADS + head * group + few % group
            tl.store(out + to[:, None] * DIM + dim[None, :], mean.to(query.dtype),
                     mask=(few // group < size)[:, None])  # fmt: skip
            tl.store(arrived + own, 0)
    else:
        to = out + ((first + token) * HEADS + query_head)[:, None] * DIM + dim[None, :]
        tl.store(to, (mixed / total[:, None]).to(query.dtype), mask=real[:, None])


def attend(qkv_nd: Tensor, heads: Heads, cached: Pair, new: NewTokens, arrived: Tensor) -> Tensor:
    """Write a few new tokens of each row to the cache, and attend from them to all of their row so far.

    It reads no further than each row's length; otherwise it is `plain.attend`, which see, for a cache that
    is contiguous.

    Args:
        qkv_nd: queries, keys and values of all new tokens.
        heads: their shape.
        cached: keys and values of one layer.
        new: whose they are; at most `FEW` a row.
        arrived: zeros, int32, at least `PROGRAMS`: they are zeros again afterwards.
    """
    rows, (keys_skcd, values_skcd) = len(new.slots_b), cached
    told = (qkv_nd, new.firsts_b, new.sizes_b, new.lengths_b, new.slots_b, keys_skcd, values_skcd)
    if not all(part.is_contiguous() for part in told):
        raise ValueError("a kernel reads contiguous tensors only")
    lines = triton.next_power_of_2(FEW * heads.count // heads.kv_count)
    splits = split_of(rows, heads.kv_count)
    parts = rows * heads.kv_count * splits * lines if splits > 1 else 0
    mixes = torch.empty(parts * heads.dim, dtype=torch.float32, device=qkv_nd.device)
    stats = torch.empty(parts * 2, dtype=torch.float32, device=qkv_nd.device)
    out_nd = qkv_nd.new_empty(len(qkv_nd), heads.count * heads.dim)
    _attend[(rows, heads.kv_count, splits)](
        qkv_nd, *_weights(heads), heads.cosine_pd, heads.sine_pd, keys_skcd, values_skcd, new.firsts_b,
        new.sizes_b, new.lengths_b, new.slots_b, out_nd, mixes, stats, arrived, splits, heads.eps,
        heads.dim**-0.5, keys_skcd.stride(0), keys_skcd.stride(1), HEADS=heads.count, KV_HEADS=heads.kv_count,
        DIM=heads.dim, TILE=max(TILE_ROWS, lines), NEW=TILE_ROWS, BLOCK=COLUMNS,
        MOST=triton.next_power_of_2(SPLITS) if splits > 1 else 1, LINES=lines,
        NORM=heads.q_weight is not None, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_nd


def split_of(rows: int, kv_heads: int) -> int:
    """Return over how many programs the context of each row and key head is split."""
    return max(1, min(SPLITS, PROGRAMS // (rows * kv_heads)))
