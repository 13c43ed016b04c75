"""Matrix products of a few tokens on a GPU, as fast as the weights can be read.

The library's products of this kind are short, 6 to 17 microseconds each, and run well below the memory's
rate. Here the weights are the left operand, 64 of their rows a program, so that the tensor cores' widest
instruction takes them straight from shared memory, and the depth is split until all processors read. Whoever
reads the parts adds them up, always in the same order.
"""

# ruff: noqa: N803, PLR0917 - a kernel has upper-case constants and many arguments

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

TOKENS = 64      # at most; more are the library's ...
GATED_TOKENS = 32  # ... or so many where it gates: shared memory holds no more
LEAST = 16       # tokens that an instruction takes: fewer are padded
WIDE = 64        # rows of the weights that a program takes
DEEP = 128       # of their columns at a time
STAGES = 4       # blocks of columns that are on their way at a time
PROGRAMS = 132   # of one product: its depth is split until there are nearly so many ...
PARTS = (4, 2)   # ... into one of these
KINDS = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["tokens"])
def _product(x, weight, out, tokens, width, depth, share, TOKENS: tl.constexpr, WIDE: tl.constexpr,
             DEEP: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr):
    # One program: some rows of the weights, over one share of the depth. Where it gates, the matching rows of
    # the weights' second half as well.
    row, token = tl.program_id(0) * WIDE + tl.arange(0, WIDE), tl.arange(0, TOKENS)
    real, part = token < tokens, tl.program_id(1)
    column = part * share + tl.arange(0, DEEP)
    places = weight + row[:, None].to(tl.int64) * depth + column[None, :]
    inputs = x + token[:, None] * depth + column[None, :]
    total = tl.zeros((WIDE, TOKENS), tl.float32)
    if GATED:
        ups = places + width.to(tl.int64) * depth
        total_up = tl.zeros((WIDE, TOKENS), tl.float32)
    for start in tl.range(0, share, DEEP, num_stages=STAGES):
        block = tl.load(places + start)
        seen = tl.trans(tl.load(inputs + start, mask=real[:, None], other=0.0))
        total = tl.dot(block, seen, total, input_precision="ieee")
        if GATED:
            total_up = tl.dot(tl.load(ups + start), seen, total_up, input_precision="ieee")
    kind = x.dtype.element_ty
    to = out + (part * tokens + token[None, :]) * width + row[:, None]
    if GATED:
        gate = total.to(kind).to(tl.float32)
        silu = (gate / (1 + tl.exp(-gate))).to(kind)
        tl.store(to, silu * total_up.to(kind), mask=real[None, :])
    else:
        tl.store(to, total.to(out.dtype.element_ty), mask=real[None, :])


def product(x_nd: Tensor, weight_od: Tensor) -> Tensor:
    """Return x @ weight.T, [tokens, out], or float32 parts that add up to it, [parts, tokens, out]."""
    if not _suited(x_nd, weight_od, len(weight_od), TOKENS):
        return functional.linear(x_nd, weight_od)
    (count, depth), width = x_nd.shape, len(weight_od)
    parts = parts_of(width, depth)
    out = x_nd.new_empty(parts, count, width, dtype=torch.float32 if parts > 1 else x_nd.dtype)
    _run(x_nd, weight_od, out, width, parts, gated=False)
    return out if parts > 1 else out[0]


def gated_product(x_nd: Tensor, gate_up_md: Tensor) -> Tensor | None:
    """Return silu(gate) * up, where gate and up are x by the halves of a matrix; None where it is not fit."""
    width = len(gate_up_md) // 2
    if not _suited(x_nd, gate_up_md, width, GATED_TOKENS):
        return None
    out_nw = x_nd.new_empty(len(x_nd), width)
    _run(x_nd, gate_up_md, out_nw, width, 1, gated=True)
    return out_nw


def parts_of(width: int, depth: int) -> int:
    """Return into how many parts the depth of a product is split."""
    programs = width // WIDE
    return next((parts for parts in PARTS if depth % (parts * DEEP) == 0 and programs * parts <= PROGRAMS), 1)


def _suited(x_nd: Tensor, weight_od: Tensor, width: int, most: int) -> bool:
    """Whether the tokens are few, the numbers half as wide as float32, and the shape whole blocks."""
    few = 0 < len(x_nd) <= most and x_nd.dtype in KINDS
    return few and not width % WIDE and not x_nd.shape[1] % DEEP and weight_od.is_contiguous()


def _run(x_nd: Tensor, weight_od: Tensor, out: Tensor, width: int, parts: int, *, gated: bool) -> None:
    count, depth = x_nd.shape
    _product[(width // WIDE, parts)](
        x_nd.contiguous(), weight_od, out, count, width, depth, depth // parts,
        TOKENS=max(LEAST, triton.next_power_of_2(count)), WIDE=WIDE, DEEP=DEEP, STAGES=STAGES, GATED=gated,
        num_warps=4,
    )  # fmt: skip
