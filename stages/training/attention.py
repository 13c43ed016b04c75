"""Causal attention over packed rows: no token sees another row's.

One operator with two implementations: on a GPU one flash-attention call over all rows, on a CPU a call a row.
It is opaque to the compiler, so that the rest of a layer compiles in one piece on either.
"""

from itertools import pairwise

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("draftmill::packed_attention", mutates_args=())
def packed_attention(queries_thd: Tensor, keys_tkd: Tensor, values_tkd: Tensor, bounds_s: Tensor,
                     longest: int) -> tuple[Tensor, Tensor]:
    """Attend from each token to itself and those before it in its own row; scale 1 / sqrt(head_dim).

    Args:
        queries_thd: [tokens, heads, head_dim]; on a GPU float16 or bfloat16.
        keys_tkd, values_tkd: [tokens, kv_heads, head_dim]; heads is a multiple of kv_heads.
        bounds_s: where each row begins, and last the number of tokens, int32.
        longest: no row has more tokens.

    Returns:
        The attended values, [tokens, heads, head_dim], and the logarithms of the softmax's denominators,
        float32 [heads, tokens], which the way back needs.
    """
    out_thd = torch.empty_like(queries_thd)
    sums_ht = queries_thd.new_empty(queries_thd.shape[1], queries_thd.shape[0], dtype=torch.float32)
    for row in _rows(bounds_s):
        keys_1hrd, values_1hrd = (_spread(x[row], queries_thd.shape[1]) for x in (keys_tkd, values_tkd))
        out_1hrd, sums_1hr = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(queries_thd[row]), keys_1hrd, values_1hrd, 0.0, True
        )
        out_thd[row] = out_1hrd[0].transpose(0, 1)
        sums_ht[:, row] = sums_1hr[0]
    return out_thd, sums_ht


@packed_attention.register_kernel("cuda")
def _(queries_thd: Tensor, keys_tkd: Tensor, values_tkd: Tensor, bounds_s: Tensor,
      longest: int) -> tuple[Tensor, Tensor]:
    out_thd, sums_ht, *_ = aten._flash_attention_forward(
        queries_thd, keys_tkd, values_tkd, bounds_s, bounds_s, longest, longest, 0.0, True, False
    )
    return out_thd, sums_ht


@packed_attention.register_fake
def _(queries_thd: Tensor, keys_tkd: Tensor, values_tkd: Tensor, bounds_s: Tensor,
      longest: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = queries_thd.shape
    return torch.empty_like(queries_thd), queries_thd.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("draftmill::packed_attention_backward", mutates_args=())
def packed_attention_backward(  # noqa: PLR0917 (an operator's arguments have places, not names)
        gradient_thd: Tensor, queries_thd: Tensor, keys_tkd: Tensor, values_tkd: Tensor,
        out_thd: Tensor, sums_ht: Tensor, bounds_s: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; arguments as `packed_attention` took and left."""
    heads = queries_thd.shape[1]
    found = tuple(torch.empty_like(x) for x in (queries_thd, keys_tkd, values_tkd))
    for row in _rows(bounds_s):
        keys_1hrd, values_1hrd = (_spread(x[row], heads) for x in (keys_tkd, values_tkd))
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(gradient_thd[row]), _heads_first(queries_thd[row]), keys_1hrd, values_1hrd,
            _heads_first(out_thd[row]), sums_ht[None, :, row].contiguous(), 0.0, True,
        )
        for whole, part in zip(found, parts, strict=True):
            kept = whole.shape[1]  # heads that share keys add up their gradients
            whole[row] = part[0].reshape(kept, heads // kept, -1, part.shape[-1]).sum(1).transpose(0, 1)
    return found[0], found[1], found[2]


@packed_attention_backward.register_kernel("cuda")
def _(  # noqa: PLR0917
        gradient_thd: Tensor, queries_thd: Tensor, keys_tkd: Tensor, values_tkd: Tensor, out_thd: Tensor,
      sums_ht: Tensor, bounds_s: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros(2, dtype=torch.uint64, device=queries_thd.device)  # dropout's seed: there is none
    parts: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
        gradient_thd.contiguous(), queries_thd, keys_tkd, values_tkd, out_thd, sums_ht, bounds_s, bounds_s,
        longest, longest, 0.0, True, unused, unused,
    )
    return parts


@packed_attention_backward.register_fake
def _(  # noqa: PLR0917
        gradient_thd: Tensor, queries_thd: Tensor, keys_tkd: Tensor, values_tkd: Tensor, out_thd: Tensor,
      sums_ht: Tensor, bounds_s: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(queries_thd), torch.empty_like(keys_tkd), torch.empty_like(values_tkd)


def _remember(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...],
              output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: torch.autograd.function.FunctionCtx, gradient_thd: Tensor, _sums: Tensor) -> tuple[
        Tensor, Tensor, Tensor, None, None]:
    queries, keys, values, bounds_s, out, sums = ctx.saved_tensors  # type: ignore[attr-defined]
    parts = packed_attention_backward(gradient_thd, queries, keys, values, out, sums, bounds_s,
                                      ctx.longest)  # type: ignore[attr-defined]
    return (*parts, None, None)


packed_attention.register_autograd(_gradients, setup_context=_remember)


def _rows(bounds_s: Tensor) -> list[slice]:
    return [slice(first, last) for first, last in pairwise(bounds_s.tolist()) if last > first]


def _heads_first(x_rhd: Tensor) -> Tensor:
    return x_rhd.transpose(0, 1)[None]


def _spread(x_rkd: Tensor, heads: int) -> Tensor:
    return _heads_first(x_rkd.repeat_interleave(heads // x_rkd.shape[1], dim=1))
