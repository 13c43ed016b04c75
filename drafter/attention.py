"""Attention of one new token a row over the cache: a Triton kernel on a GPU, plain torch everywhere else."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from drafter import logs
from drafter.config import ModelConfig

Pair = tuple[Tensor, Tensor]  # keys and values
# (queries_bhd, new, cached, lengths_b, context) -> out_bhd; see `attend_one`
AttendOne = Callable[[Tensor, Pair, Pair, Tensor, int], Tensor]

TRIAL_LENGTHS = (0, 1, 63, 64, 65, 150)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 8e-3}


def attend_one(queries_bhd: Tensor, new: Pair, cached: Pair, lengths_b: Tensor, context: int) -> Tensor:
    """Write one new token of each row to the cache, and attend from it to all of its row up to itself.

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
    # The heads of a group share their keys: fold them into the token axis instead of copying keys.
    folded_bkgd = queries_bhd.reshape(rows, keys_bkcd.shape[1], -1, queries_bhd.shape[-1])
    visible_bc = torch.arange(context, device=lengths_b.device) <= lengths_b[:, None]
    visible_b1gc = visible_bc[:, None, None].expand(-1, -1, folded_bkgd.shape[2], -1)
    out_bkgd = functional.scaled_dot_product_attention(
        folded_bkgd, keys_bkcd[:rows, :, :context], values_bkcd[:rows, :, :context], attn_mask=visible_b1gc
    )
    return out_bkgd.flatten(1, 2)


def fastest(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[AttendOne, bool]:
    """Return the attention to use, and whether it reads no further than each row's length by itself.

    The kernel is compiled here and held to plain torch; where either fails, plain torch serves and the log
    says so.
    """
    if device.type != "cuda":
        return attend_one, False
    try:
        from drafter import kernels  # noqa: PLC0415 - Triton is there on a GPU only

        error = difference(kernels.attend_one, config, dtype, device)
        if error <= TOLERANCE[dtype]:
            return kernels.attend_one, True
        reason = f"it differs by {error:.2g}"
    except Exception as problem:  # whatever stops Triton, torch serves
        reason = logs.described(problem)
    logs.event(logging.WARNING, "the attention kernel is not used", reason=reason)
    return attend_one, False


def difference(kernel: AttendOne, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> float:
    """Return by how much a kernel's outputs and cache differ at most from plain torch's on random rows."""
    rows, columns = len(TRIAL_LENGTHS), max(TRIAL_LENGTHS) + 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    queries = random(rows, config.heads, config.head_dim)
    fresh = (rows, config.kv_heads, config.head_dim)
    stored = (rows, config.kv_heads, columns, config.head_dim)
    new, cached = (random(*fresh), random(*fresh)), (random(*stored), random(*stored))
    copied = (cached[0].clone(), cached[1].clone())
    lengths_b = torch.tensor(TRIAL_LENGTHS, device=device)
    expected = attend_one(queries, new, cached, lengths_b, columns)
    found = kernel(queries, new, copied, lengths_b, columns)
    pairs = [(expected, found), *zip(cached, copied, strict=True)]
    return max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs)
