"""bench-teacher: generation for the teacher beside transformers' generate and the floor.

Usage: python -m benchmarks.teacher [--cases qwen3-8b smollm2] [--rows 1024] [--tokens 128]

qwen3-8b: random weights, prompts of 128 random ids, so many tokens each, stop ignored. smollm2: the real
target, as `make fetch` leaves it, and the dev prompts again and again, until stop or cap. Ours chooses
greedily with top-16 logprobs; `generate` only chooses, at the batch of --plain that is fastest. The floor of
a step is one read of the weights and of the live keys and values at the copy rate, or its matrix products at
the rate of large ones where that is longer; the prompts' products are added.
"""

import argparse
import itertools
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine, write_results
from benchmarks.shapes import (
    SHAPES,
    clear,
    copy_rate,
    device_and_dtype,
    generate,
    peak_gib,
    random_decoder,
    random_transformers,
    seconds,
    synchronize,
    token_bytes,
    weight_bytes,
)
from drafter.engine import Engine, Generated, Generation
from drafter.model import Decoder
from stages.files import read_jsonl
from stages.models.target import load_target
from stages.models.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "vendor" / "smollm2-135m-instruct"
PROMPT, TOP_K, SIDE, STOP = 128, 16, 8_192, 2


def main(argv: list[str] | None = None) -> int:
    """Measure, and write benchmarks/results/teacher-<device>.json."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--cases", nargs="+", choices=[*SHAPES, "smollm2"], default=["qwen3-8b", "smollm2"])
    parser.add_argument("--rows", type=int, default=1_024, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="of each continuation, at most")
    parser.add_argument("--plain", nargs="+", type=int, default=[64, 256], help="batches that generate tries")
    options = parser.parse_args(argv)
    if "smollm2" in options.cases and not SMOLLM2.is_dir():
        print(f"draftmill: {SMOLLM2} is missing; run `make fetch`, or leave smollm2 out", file=sys.stderr)
        return 2
    found: dict[str, Any] = machine("python -m benchmarks.teacher")
    rates = copy_rate(), matmul_rate()
    found |= {"copy_tb_per_s": round(rates[0] / 1e12, 3), "matmul_tflops_per_s": round(rates[1] / 1e12, 1)}
    for name in options.cases:
        clear()
        found[name] = measure(name, options, rates)
        print(name, json.dumps(found[name]), flush=True)
        write_results("teacher", found)
    return 0


def measure(name: str, options: argparse.Namespace, rates: tuple[float, float]) -> dict[str, Any]:
    """Time one case: ours, then transformers'."""
    stops: tuple[int, ...] = (STOP,) if name == "smollm2" else ()
    device, dtype = device_and_dtype()
    if name == "smollm2":
        decoder = load_target(SMOLLM2, "gguf", str(dtype).removeprefix("torch."), device)
        prompts = real_prompts(SMOLLM2, options.rows)
    else:
        decoder = random_decoder(SHAPES[name])
        number = torch.Generator().manual_seed(0)
        shape = (options.rows, PROMPT)
        prompts = torch.randint(SHAPES[name].vocab_size, shape, generator=number).tolist()
    config, settings = decoder.config, Generation(options.tokens, stops, TOP_K)
    engine = Engine(decoder, max(map(len, prompts)) + options.tokens)
    engine.generate(prompts[:8], Generation(4, stops, TOP_K))
    kept: list[Generated] = []
    cold = seconds(partial(_into, kept, engine, prompts, settings))
    warm = seconds(partial(_into, [], engine, prompts, settings))
    made = sum(len(row.tokens) for row in kept)
    least = floor(decoder, prompts, kept, rates)
    rows = engine.generator.kept[1].count if engine.generator and engine.generator.kept else len(prompts)
    found = {"prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)), "tokens": made,
             "ours_tokens_per_s": round(made / warm), "first_run_tokens_per_s": round(made / cold),
             "floor_tokens_per_s": round(made / least), "ours_over_floor": round(warm / least, 2),
             "rows_at_once": rows, "peak_gib": peak_gib()}  # fmt: skip
    weights = decoder.state_dict() if name == "smollm2" else {}
    del engine, decoder
    clear()
    model = random_transformers(config)
    model.load_state_dict(weights, strict=False)
    found |= beside(model, prompts, stops, options)
    found["ours_over_generate"] = round(found["ours_tokens_per_s"] / found["generate_tokens_per_s"], 1)
    return found


def _into(kept: list[Generated], engine: Engine, prompts: list[list[int]], settings: Generation) -> None:
    kept += engine.generate(prompts, settings)


def beside(model: Any, prompts: list[list[int]], stops: tuple[int, ...],
           options: argparse.Namespace) -> dict[str, Any]:
    """Time `generate` at each batch that fits, on prompts spread over all lengths, and keep the fastest."""
    best: dict[str, Any] = {"generate_tokens_per_s": 0, "generate_batch": 0}
    generate(model, prompts[:8], 4)
    for batch in options.plain:
        part = sorted(prompts, key=len)[:: max(1, len(prompts) // batch)][:batch]
        try:
            synchronize()
            began = time.perf_counter()
            rows = generate(model, part, options.tokens, stops).tolist()
            taken = time.perf_counter() - began
        except torch.OutOfMemoryError:
            break
        made = sum(next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows)
        if made / taken > best["generate_tokens_per_s"]:
            best = {"generate_tokens_per_s": round(made / taken), "generate_batch": len(part)}
    return best


def real_prompts(folder: Path, count: int) -> list[list[int]]:
    """Return the dev prompts of the real target, as often as it takes."""
    tokenizer = load_tokenizer(folder, "gguf")
    dev = [tokenizer.prompt(row["messages"]) for row in read_jsonl(ROOT / "examples" / "dev.jsonl")]
    return list(itertools.islice(itertools.cycle(dev), count))


def floor(decoder: Decoder, prompts: list[list[int]], made: list[Generated],
          rates: tuple[float, float]) -> float:
    """Return the least seconds that this work takes; see the module's head."""
    copied, multiplied = rates
    weights, config = sum(weight.numel() for weight in decoder.parameters()), decoder.config
    body = weights - config.vocab_size * config.hidden_size * (1 if config.tied else 2)
    head = config.vocab_size * config.hidden_size
    total = 2 * body * sum(map(len, prompts)) / multiplied
    for step in range(max(len(row.tokens) for row in made)):
        alive = [len(prompt) + step for prompt, row in zip(prompts, made, strict=True)
                 if len(row.tokens) > step]  # fmt: skip
        read = (weight_bytes(decoder) + token_bytes(config) * sum(alive)) / copied
        total += max(read, 2 * (body + head) * len(alive) / multiplied)
    return total


def matmul_rate() -> float:
    """Return FLOP/s of a large matrix product, the best of five."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = SIDE if device == "cuda" else SIDE >> 4
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return 2 * side**3 / min(seconds(lambda: left @ left) for _ in range(5))


if __name__ == "__main__":
    sys.exit(main())
