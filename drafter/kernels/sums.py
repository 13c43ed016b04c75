"""Norms, gates and residual sums: what lies between products, and adds up the parts of one."""

# ruff: noqa: N803, PLR0917 - a kernel has upper-case constants and many arguments

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from drafter.kernels.products import gated_product

GATED = 1024  # elements of a gate that one program does


@triton.jit
def read(place, real, stride, kind: tl.constexpr, PARTS: tl.constexpr):
    """Return numbers of a type, of which a product may have left only the parts: add these up."""
    value = tl.load(place, mask=real, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(place + part * stride, mask=real, other=0.0)
    return value.to(kind)


@triton.jit
def _norm(x, branch, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    # One program adds to one token's residual, in place, and normalises it. All are contiguous.
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    real = column < SIZE
    place = row.to(tl.int64) * SIZE + column
    value = tl.load(x + place, mask=real, other=0.0)
    if PARTS:
        more = read(branch + place, real, tl.num_programs(0).to(tl.int64) * SIZE, tl.float32, PARTS)
        value = (value.to(tl.float32) + more).to(value.dtype)
        tl.store(x + place, value, mask=real)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    scaled = wide * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, scaled.to(value.dtype), mask=real)


def add_norm(x_nd: Tensor, branch_nd: Tensor | None, weight_d: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + branch, which x becomes, and its RMS norm; the branch may be the parts of a product."""
    rows, size = x_nd.shape
    out_nd = torch.empty_like(x_nd)
    block = triton.next_power_of_2(size)
    added_nd = x_nd if branch_nd is None else branch_nd
    _norm[(rows,)](x_nd, added_nd, weight_d, out_nd, eps, SIZE=size, BLOCK=block,
                   PARTS=0 if branch_nd is None else parts_in(branch_nd), num_warps=16 if block > 1024 else 4)
    return x_nd, out_nd


def parts_in(product_nd: Tensor) -> int:
    """Return how many parts there are of a product, [tokens, out] or [parts, tokens, out]."""
    return len(product_nd) if product_nd.ndim == 3 else 1


@triton.jit
def _gate(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * SIZE + column, silu * up, mask=real)


def gated(x_nd: Tensor, gate_up_md: Tensor) -> Tensor:
    """Return silu(gate) * up, where gate and up are x by the halves of a matrix."""
    found_nw = gated_product(x_nd, gate_up_md)
    if found_nw is not None:
        return found_nw
    both_nm = functional.linear(x_nd, gate_up_md)
    rows, size = len(x_nd), len(gate_up_md) // 2
    out_nw = x_nd.new_empty(rows, size)
    _gate[(rows, triton.cdiv(size, GATED))](both_nm, out_nw, SIZE=size, BLOCK=GATED)
    return out_nw
