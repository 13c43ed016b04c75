"""The trial of the kernels at start-up: each is held to plain torch in the very shape that it will serve."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from drafter import logs, plain
from drafter.config import ModelConfig
from drafter.model import rotary_tables
from drafter.plain import FEW, Heads, NewTokens
from drafter.settings import PLAIN

Results = tuple[Tensor, ...]
ROWS = ((0, 1), (1, 1), (63, 2), (0, 0), (64, 1), (65, 2), (300, 1), (0, 2))  # cached and new tokens of each
FEW_AND_MORE = (5, 17, 33)  # tokens of a product: it pads them to 16, 32 or 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@cache
def trusted(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """Return the kernels where there is a GPU and they do as plain torch does; else the log says why not.

    The trial is held once a process and shape: it compiles what will be served, which takes seconds.
    """
    if device.type != "cuda" or os.environ.get(PLAIN):
        return None
    try:
        from drafter import kernels  # noqa: PLC0415 - Triton is there on a GPU only

        found = differences(kernels, config, dtype, device)
    except Exception as problem:  # whatever stops Triton, torch serves
        reason = logs.described(problem)
    else:
        wrong = {name: f"{error:.2g}" for name, error in found.items() if not error <= TOLERANCE[dtype]}
        if not wrong:
            return kernels
        reason = f"they differ from plain torch by {wrong}"
    logs.event(logging.WARNING, "kernels are not used", reason=reason)
    return None


def differences(kernels: ModuleType, config: ModelConfig, dtype: torch.dtype,
                device: torch.device) -> dict[str, float]:
    """Return by how much each kernel's results differ at most from plain torch's on random numbers.

    Nearly all of the time goes to Triton, its assembler and the C compiler, which work side by side. No
    kernel is in two of the checks.
    """
    checks = (_sums, _products, _attentions)

    def run(check: Callable[..., dict[str, float]]) -> dict[str, float]:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return check(kernels, config, _Random(dtype, device))

    # Where there is no GPU, Triton's interpreter can do one thing at a time.
    with ThreadPoolExecutor(len(checks) if device.type == "cuda" else 1) as pool:
        return dict(chain.from_iterable(found.items() for found in pool.map(run, checks)))


def _sums(kernels: ModuleType, config: ModelConfig, random: "_Random") -> dict[str, float]:
    x_nd, branch_nd = random(5, config.hidden_size), random(5, config.hidden_size)
    weight_d, heads = random(config.hidden_size), _heads(config, random)
    qkv_nd = random(5, (config.heads + 2 * config.kv_heads) * config.head_dim)
    positions_n = torch.arange(5, device=random.device) * 7

    def both(make: Callable[[Any], Results]) -> float:
        return _difference(make(kernels), make(plain))

    found = {
        "norm": both(lambda ops: ops.add_norm(x_nd.clone(), None, weight_d, 1e-5)),
        "rotation": both(lambda ops: ops.turned(qkv_nd, heads, positions_n)),
    }
    expected = plain.add_norm(x_nd, branch_nd, weight_d, 1e-5)
    for parts in {1, kernels.products.parts_of(config.hidden_size, config.hidden_size)}:
        summed = kernels.add_norm(x_nd.clone(), _parted(branch_nd, parts), weight_d, 1e-5)
        found[f"sum of {parts} parts and norm"] = _difference(summed, expected)
    return found


def _products(kernels: ModuleType, config: ModelConfig, random: "_Random") -> dict[str, float]:
    found: dict[str, float] = {}
    for rows in FEW_AND_MORE:
        found |= _product(kernels, random, rows, config.hidden_size)
    return found


def _product(kernels: ModuleType, random: "_Random", rows: int, size: int) -> dict[str, float]:
    x_nd, weight_dd = random(rows, size), random(size, size) / size**0.5
    product = kernels.product(x_nd, weight_dd)
    whole = product.sum(0) if product.ndim == 3 else product
    return {
        f"product of {rows}": _difference((whole,), (plain.product(x_nd, weight_dd),)),
        f"gate of {rows}": _difference((kernels.gated(x_nd, weight_dd),), (plain.gated(x_nd, weight_dd),)),
    }


def _attentions(kernels: ModuleType, config: ModelConfig, random: "_Random") -> dict[str, float]:
    heads, width = _heads(config, random), (config.heads + 2 * config.kv_heads) * config.head_dim
    # So many rows that none is split:
    unsplit = kernels.attention.PROGRAMS // (2 * heads.kv_count * len(ROWS)) + 1
    return {
        f"attention {how} from {parts} of a product":
            _difference(*_attention(kernels, heads, random, times, parts))
        for times, how in ((1, "in parts"), (unsplit, "to whole rows"))
        for parts in {1, kernels.products.parts_of(width, config.hidden_size)}
    }


def _attention(kernels: ModuleType, heads: Heads, random: "_Random", times: int,
               parts: int) -> tuple[Results, Results]:
    rows, device = list(ROWS) * times, random.device
    lengths_b, sizes_b = torch.tensor(rows, device=device).T.contiguous()
    slots_b = torch.arange(len(rows), device=device).flip(0)
    firsts_b = torch.arange(len(rows), device=device) * FEW
    columns = max(length + size for length, size in rows)
    stored = (len(rows), heads.kv_count, columns, heads.dim)
    cached = (random(*stored), random(*stored))
    copied = (cached[0].clone(), cached[1].clone())
    qkv_nd = random(len(rows) * FEW, (heads.count + 2 * heads.kv_count) * heads.dim)
    arrived = torch.zeros(kernels.attention.PROGRAMS, dtype=torch.int32, device=device)
    new = NewTokens(firsts_b, sizes_b, lengths_b, slots_b)
    expected_nd = plain.attend(qkv_nd, heads, cached, new)
    for _ in range(2):  # a second time the counters must be as they were
        found_nd = kernels.attend(_parted(qkv_nd, parts), heads, copied, new, arrived)
    real_n = new.places_3n[0]
    return (found_nd[real_n], *copied, arrived), (expected_nd[real_n], *cached, torch.zeros_like(arrived))


def _parted(product_nd: Tensor, parts: int) -> Tensor:
    """Return a product as kernels leave it: whole, or in so many parts that add up to it."""
    return product_nd if parts == 1 else (product_nd.float() / parts).expand(parts, -1, -1).contiguous()


def _heads(config: ModelConfig, random: "_Random") -> Heads:
    q_weight, k_weight = (random(config.head_dim) if config.qk_norm else None for _ in range(2))
    positions_1t = torch.arange(max(map(sum, ROWS)), device=random.device)[None]
    cosine, sine = rotary_tables(positions_1t, config)
    return Heads(config.heads, config.kv_heads, config.head_dim, q_weight, k_weight, 1e-5, cosine[0, 0],
                 sine[0, 0])  # fmt: skip


class _Random:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)


def _difference(found: Results, expected: Results) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs)
