"""What transformers itself offers for fast drafting, beside the engine: a compiled static cache, and NF4."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from benchmarks.shapes import clear, generate, random_decoder, random_transformers, seconds
from drafter.config import ModelConfig
from drafter.engine import Engine

WARM, TIMED = 2, 3  # runs of each; the first compile, or record graphs


def others(config: ModelConfig, requests: dict[str, list[list[int]]], count: int, context_tokens: int,
           ours: Callable[[Engine, list[list[int]]], float]) -> dict[str, Any]:
    """Time drafts of `count` ids for each batch of requests.

    Args:
        config: the shape; weights are random.
        requests: by name, conversations of one length.
        count: ids of a draft.
        context_tokens: of the engine.
        ours: returns the seconds that a draft takes the engine.

    Returns:
        Milliseconds of ours, of `generate` with a static cache (which transformers compiles), and of
        `generate` over bitsandbytes' NF4 weights, and each as a multiple of ours; by name.
    """
    decoder = random_decoder(config)
    engine = Engine(decoder, context_tokens, slots=max(map(len, requests.values())))
    found: dict[str, Any] = {name: {"ours_ms": round(1e3 * ours(engine, batch), 2)}
                             for name, batch in requests.items()}  # fmt: skip
    del engine, decoder
    clear()
    model = random_transformers(config)
    for kind in ("static", "nf4"):
        if kind == "nf4":
            quantise(model)
        for name, batch in requests.items():
            draft = partial(generate, model, batch, count, static=kind == "static")
            taken = min([seconds(draft) for _ in range(WARM + TIMED)][WARM:])
            found[name] |= {f"{kind}_ms": round(1e3 * taken, 1),
                            f"{kind}_over_ours": round(1e3 * taken / found[name]["ours_ms"], 1)}
            print(kind, name, found[name], flush=True)
    del model, draft
    clear()
    return found


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
