"""What transformers itself offers for fast drafting, beside the engine: a compiled static cache, and NF4."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from benchmarks.shapes import clear, generate, random_transformers, seconds
from drafter.config import ModelConfig

WARM, TIMED = 2, 3  # runs of each; the first compile, or record graphs


def others(config: ModelConfig, requests: dict[str, list[list[int]]],
           count: int) -> Iterator[tuple[str, str, float]]:
    """Time drafts of `count` ids for each batch of requests, over random weights of a shape.

    Yields:
        A batch's name, which of the two it is, `static` (a cache that transformers compiles for) or `nf4`
        (weights as bitsandbytes has them), and the least seconds of a draft.
    """
    model = random_transformers(config)
    for kind in ("static", "nf4"):
        if kind == "nf4":
            quantise(model)
        for name, batch in requests.items():
            draft = partial(generate, model, batch, count, static=kind == "static")
            yield name, kind, min([seconds(draft) for _ in range(WARM + TIMED)][WARM:])
    del model, draft
    clear()


def quantise(model: Any) -> None:
    """Put products with NF4 weights in place of those of all layers, as bitsandbytes has them."""
    import bitsandbytes  # noqa: PLC0415 - seconds, and only this needs it

    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                weight, rows, columns = child.weight.detach(), child.out_features, child.in_features
                four = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, compute_dtype=weight.dtype,
                                                  quant_type="nf4", device="meta")
                four.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
                setattr(module, name, four.to(weight.device))
