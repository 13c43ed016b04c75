"""Attention from a few new tokens of each row to all of its context, and the rotation before it."""

# ruff: noqa: N803, PLR0917 - a kernel has upper-case constants and many arguments

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.kernels.sums import parts_in, read
from drafter.plain import FEW, Heads, NewTokens, Pair

TILE_ROWS = 16   # the least that a matrix product takes: queries that share a key head are padded to it
COLUMNS = 32     # of the cache, read at a time
WARPS = 4
STAGES = 3       # blocks of columns that are on their way at a time
PROGRAMS = 256   # of one attention: rows are split over their context until there are so many ...
SPLITS = 16      # ... but no finer than this


@triton.jit
def _turned(place, real, weight, position, cosine, sine, eps, stride, kind: tl.constexpr,
            DIM: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr):
    # Normalise, where the model does, and rotate one head a line; `place` is where each begins.
    half: tl.constexpr = DIM // 2
    dim = tl.arange(0, DIM)
    other = (dim + half) % DIM
    real = real[:, None]
    x = read(place[:, None] + dim[None, :], real, stride, kind, PARTS).to(tl.float32)
    y = read(place[:, None] + other[None, :], real, stride, kind, PARTS).to(tl.float32)
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
    kind: tl.constexpr = out.dtype.element_ty
    queries = _turned(from_, query, q_weight, position, cosine, sine, eps, 0, kind, DIM, NORM, 1)
    tl.store(to, queries, mask=query[:, None])
    keys = _turned(from_, key, k_weight, position, cosine, sine, eps, 0, kind, DIM, NORM, 1)
    tl.store(to, keys, mask=key[:, None])


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


@triton.jit
def _new(qkv, weight, cosine, sine, first, fresh, length, eps, stride, kind: tl.constexpr,
         HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NEW: tl.constexpr,
         NORM: tl.constexpr, PARTS: tl.constexpr):
    # The keys and values of a row's new tokens.
    new, dim = tl.arange(0, NEW), tl.arange(0, DIM)
    place = qkv + (first + new) * ((HEADS + 2 * KV_HEADS) * DIM) + (HEADS + tl.program_id(1)) * DIM
    key = _turned(place, fresh, weight, length + new, cosine, sine, eps, stride, kind, DIM, NORM, PARTS)
    value = read(place[:, None] + KV_HEADS * DIM + dim[None, :], fresh[:, None], stride, kind, PARTS)
    return key, value


@triton.jit
def _attend_new(query, token, key, value, keys, values, cached, fresh, length, scale, DIM: tl.constexpr,
                NEW: tl.constexpr):
    # Write a row's new tokens to the cache, and attend from them to themselves.
    new, dim = tl.arange(0, NEW), tl.arange(0, DIM)
    place = cached + (length + new)[:, None] * DIM + dim[None, :]
    tl.store(keys + place, key, mask=fresh[:, None])
    tl.store(values + place, value, mask=fresh[:, None])
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(new[None, :] <= token[:, None], scores, float("-inf"))
    best = tl.max(scores, axis=1)
    weights = tl.exp(scores - best[:, None])
    return best, tl.sum(weights, axis=1), tl.dot(weights.to(value.dtype), value, input_precision="ieee")


@triton.jit
def _note(best, total, mixed, mixes, stats, own, part, splits, used, DIM: tl.constexpr, TILE: tl.constexpr,
          LINES: tl.constexpr):
    # Leave a part's result, on the lines that are used, for whoever puts the parts together.
    line, dim = tl.arange(0, TILE), tl.arange(0, DIM)
    mix_place = mixes + (own * splits + part) * LINES * DIM + line[:, None] * DIM + dim[None, :]
    tl.store(mix_place, mixed, mask=(line < used)[:, None])
    stat_place = stats + (own * splits + part) * 2 * LINES + line
    tl.store(stat_place, best, mask=line < used)
    tl.store(stat_place + LINES, total, mask=line < used)


@triton.jit
def _put_together(mixes, stats, own, splits, used, MOST: tl.constexpr, DIM: tl.constexpr,
                  LINES: tl.constexpr):
    # Weigh the parts of a row's context, all at once and always in the same order.
    part, line, dim = tl.arange(0, MOST)[:, None], tl.arange(0, LINES)[None, :], tl.arange(0, DIM)
    stat = stats + (own * splits + part) * 2 * LINES + line
    made = (part < splits) & (line < used)
    bests = tl.load(stat, mask=made, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stat + LINES, mask=made, other=0.0, cache_modifier=".cg")
    place = ((own * splits + part) * LINES + line)[:, :, None] * DIM + dim[None, None, :]
    parts = tl.load(mixes + place, mask=made[:, :, None], other=0.0, cache_modifier=".cg")
    # The first part has seen a token, so there is a finite best.
    kept = tl.exp(bests - tl.max(bests, axis=0)[None, :])
    return tl.sum(parts * kept[:, :, None], axis=0) / tl.sum(totals * kept, axis=0)[:, None]


@triton.jit(do_not_specialize=["splits", "stride_part"])
def _attend(qkv, q_weight, k_weight, cosine, sine, keys, values, firsts, sizes, lengths, slots, out, mixes,
            stats, arrived, splits, eps, scale, stride_part, stride_slot, stride_head, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, NEW: tl.constexpr,
            BLOCK: tl.constexpr, MOST: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr,
            PARTS: tl.constexpr):
    # One program attends from a row's new tokens, by the query heads that share a key head, to one part of
    # the row's context; the first part has the new tokens themselves. Whichever of a row's parts is done last
    # puts them together.
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    kind: tl.constexpr = keys.dtype.element_ty
    first, size = tl.load(firsts + row), tl.load(sizes + row)
    length, slot = tl.load(lengths + row), tl.load(slots + row).to(tl.int64)
    line, dim, column = tl.arange(0, TILE), tl.arange(0, DIM), tl.arange(0, BLOCK)
    token, query_head = line // group, head * group + line % group
    real = token < size
    cached = slot * stride_slot + head.to(tl.int64) * stride_head
    span = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    query_place = qkv + (first + token) * ((HEADS + 2 * KV_HEADS) * DIM) + query_head * DIM
    query = _turned(query_place, real, q_weight, length + token, cosine, sine, eps, stride_part, kind, DIM,
                    NORM, PARTS)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, DIM), tl.float32)
    # New tokens are read outside the branch, so that nobody waits twice; the other parts read nothing.
    fresh = (tl.arange(0, NEW) < size) & (part == 0)
    new_key, new_value = _new(qkv, k_weight, cosine, sine, first, fresh, length, eps, stride_part, kind,
                              HEADS, KV_HEADS, DIM, NEW, NORM, PARTS)
    if part == 0:
        best, total, mixed = _attend_new(query, token, new_key, new_value, keys, values, cached, fresh,
                                         length, scale, DIM, NEW)
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
        mixed = mixed * kept[:, None] + tl.dot(weights.to(kind), value, input_precision="ieee")
        best = better
    if MOST > 1:
        own = row * KV_HEADS + head
        _note(best, total, mixed, mixes, stats, own, part, splits, size * group, DIM, TILE, LINES)
        tl.debug_barrier()
        if tl.atomic_add(arrived + own, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            mean = _put_together(mixes, stats, own, splits, size * group, MOST, DIM, LINES)
            few = tl.arange(0, LINES)
            to = (first + few // group) * HEADS + head * group + few % group
            tl.store(out + to[:, None] * DIM + dim[None, :], mean.to(kind),
                     mask=(few // group < size)[:, None])  # fmt: skip
            tl.store(arrived + own, 0)
    else:
        to = out + ((first + token) * HEADS + query_head)[:, None] * DIM + dim[None, :]
        tl.store(to, (mixed / total[:, None]).to(kind), mask=real[:, None])


def attend(qkv_nd: Tensor, heads: Heads, cached: Pair, new: NewTokens, arrived: Tensor) -> Tensor:
    """Write a few new tokens of each row to the cache, and attend from them to all of their row so far.

    It reads no further than each row's length; otherwise it is `plain.attend`, which see, for a cache that
    is contiguous.

    Args:
        qkv_nd: queries, keys and values of all new tokens, or the parts of that product.
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
    tokens, width = qkv_nd.shape[-2:]
    out_nd = keys_skcd.new_empty(tokens, heads.count * heads.dim)
    _attend[(rows, heads.kv_count, splits)](
        qkv_nd, *_weights(heads), heads.cosine_pd, heads.sine_pd, keys_skcd, values_skcd, new.firsts_b,
        new.sizes_b, new.lengths_b, new.slots_b, out_nd, mixes, stats, arrived, splits, heads.eps,
        heads.dim**-0.5, tokens * width, keys_skcd.stride(0), keys_skcd.stride(1), HEADS=heads.count,
        KV_HEADS=heads.kv_count, DIM=heads.dim, TILE=max(TILE_ROWS, lines), NEW=TILE_ROWS, BLOCK=COLUMNS,
        MOST=triton.next_power_of_2(SPLITS) if splits > 1 else 1, LINES=lines,
        NORM=heads.q_weight is not None, PARTS=parts_in(qkv_nd),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_nd


def split_of(rows: int, kv_heads: int) -> int:
    """Return over how many programs the context of each row and key head is split."""
    return max(1, min(SPLITS, PROGRAMS // (rows * kv_heads)))
