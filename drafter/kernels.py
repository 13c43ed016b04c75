"""Triton kernels for a GPU. Each has a plain torch counterpart that a test holds it to."""

# ruff: noqa: N803, PLR0917 - a kernel's constants are upper case and its arguments many

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16  # the least that a matrix product takes; a group of heads is padded to it
BLOCK = 64      # columns read at a time


@triton.jit
def _attend_one(queries, new_keys, new_values, keys, values, lengths, out, scale, stride_row, stride_head,
                GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    # One program does one row's group of query heads, which share a key head. Queries, new keys and values
    # and out are contiguous, [rows, heads, DIM]; keys and values are the cache of one layer.
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    length = tl.load(lengths + row)
    group, dim, column = tl.arange(0, TILE), tl.arange(0, DIM), tl.arange(0, COLUMNS)
    real = (group < GROUP)[:, None]
    place = ((row * heads + head) * GROUP + group)[:, None] * DIM + dim[None, :]
    query = tl.load(queries + place, mask=real, other=0.0)
    fresh = (row * heads + head) * DIM + dim
    new_key, new_value = tl.load(new_keys + fresh), tl.load(new_values + fresh)
    cached = row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    tl.store(keys + cached + length * DIM + dim, new_key)
    tl.store(values + cached + length * DIM + dim, new_value)
    # The running softmax starts with the new token itself, which is not read back from the cache.
    best = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full((TILE,), 1.0, tl.float32)
    mixed = tl.zeros((TILE, DIM), tl.float32) + new_value.to(tl.float32)[None, :]
    for first in range(0, length, COLUMNS):
        used = first + column < length
        block = cached + (first + column)[:, None] * DIM + dim[None, :]
        key = tl.load(keys + block, mask=used[:, None], other=0.0)
        value = tl.load(values + block, mask=used[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(used[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - better[:, None])
        kept = tl.exp(best - better)
        total = total * kept + tl.sum(weights, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = better
    result = mixed / total[:, None]
    tl.store(out + place, result.to(query.dtype), mask=real)


def attend_one(queries_bhd: Tensor, new: tuple[Tensor, Tensor], cached: tuple[Tensor, Tensor],
               lengths_b: Tensor, _context: int) -> Tensor:
    """Write one new token of each row to the cache, and attend from it to all of its row up to itself.

    It reads no further than each row's length; otherwise it is `attention.attend_one`, which see, for a cache
    that is contiguous.
    """
    rows, heads, dim = queries_bhd.shape
    keys_bkcd, values_bkcd = cached
    kv_heads = keys_bkcd.shape[1]
    queries_bhd, new_keys_bkd, new_values_bkd = (part.contiguous() for part in (queries_bhd, *new))
    out_bhd = torch.empty_like(queries_bhd)
    group = heads // kv_heads
    _attend_one[(rows, kv_heads)](
        queries_bhd, new_keys_bkd, new_values_bkd, keys_bkcd, values_bkcd, lengths_b, out_bhd, dim**-0.5,
        keys_bkcd.stride(0), keys_bkcd.stride(1), GROUP=group, DIM=dim,
        TILE=max(TILE_ROWS, triton.next_power_of_2(group)), COLUMNS=BLOCK,
    )  # fmt: skip
    return out_bhd
