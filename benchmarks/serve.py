"""bench-serve: drafting beside transformers' generate and the floor, and a whole replay over HTTP.

Usage: python -m benchmarks.serve [--parts cases others replay generate] [--limit 40]
           [--shapes qwen3-0.6b qwen3-1.7b qwen3-4b] [--batches 1 8 32] [--contexts 512 1024 1792]
           [--replayed qwen3-1.7b]

Random weights. A case drafts 16 ids for a batch whose conversations are cached but for one or two tokens
(ours), or anew, left-padded, with a dynamic cache (`generate`, as the earlier systems used it). The floor is
16 reads of the weights and of the live keys and values at the rate of a large copy on the same device. The
others are `generate` over a static cache, which it compiles, and over bitsandbytes' NF4 weights: for the
smallest and the largest batch of the first context, at the shape that is replayed. The replay is one of 200
conversations with 44,314 tokens, 32 in flight, against a server process of its own; each drafted id is
accepted with probability 0.81, which makes 5.1 tokens a step. The same on a server around `generate` is cut
off after --limit seconds and scaled by tokens (`whole_s`).
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.machine import machine, write_results
from benchmarks.others import others
from benchmarks.replay import replay, sizes
from benchmarks.shapes import (
    SHAPES,
    clear,
    copy_rate,
    generate,
    peak_gib,
    random_decoder,
    random_transformers,
    seconds,
    synchronize,
    token_bytes,
    weight_bytes,
)
from drafter import server
from drafter.config import ModelConfig
from drafter.engine import Engine
from drafter.listener import bind
from drafter.settings import Address, Settings, Sums

DRAFT, CONTEXT, SLOTS, TURNS = 16, 1_856, 32, 5
CONVERSATIONS, TOKENS = 200, 44_314
START_S = 300


def main(argv: list[str] | None = None) -> int:
    """Measure, and write benchmarks/results/serve-<device>.json."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parts = ("cases", "others", "replay", "generate")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to measure")
    shapes = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 1_024, 1_792])
    parser.add_argument("--replayed", choices=SHAPES, default="qwen3-1.7b", help="the shape that is replayed")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="of the replay")
    parser.add_argument("--limit", type=float, default=40, help="seconds of the replay on `generate`")
    parser.add_argument("--serve", choices=("engine", "generate"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        return serve(options.serve, SHAPES[options.replayed], options.port)
    if "others" in options.parts and find_spec("bitsandbytes") is None:
        print("draftmill: the others need bitsandbytes, which this Python lacks; leave them out of --parts",
              file=sys.stderr)
        return 2
    found: dict[str, Any] = machine("python -m benchmarks.serve")
    rate = copy_rate()
    found["copy_tb_per_s"] = round(rate / 1e12, 3)
    clear()
    if "cases" in options.parts:
        for shape in options.shapes:
            found[shape] = cases(SHAPES[shape], options.batches, options.contexts, rate)
            write_results("serve", found)
    if "others" in options.parts:
        batches = sorted({options.batches[0], options.batches[-1]})
        found["others"] = beside(options.replayed, batches, options.contexts[0])
        write_results("serve", found)
    for kind, limit in (("engine", 600.0), ("generate", options.limit)):
        if {"engine": "replay", "generate": "generate"}[kind] in options.parts:
            found[f"replay_{kind}"] = replayed(kind, options.replayed, options.conversations, limit)
            print(kind, found[f"replay_{kind}"], flush=True)
            write_results("serve", found)
    return 0


def cases(config: ModelConfig, batches: list[int], contexts: list[int], rate: float) -> dict[str, Any]:
    """Time one shape in every case, ours and transformers' one after the other."""
    decoder = random_decoder(config)
    engine = Engine(decoder, CONTEXT, slots=max(*batches, 1))
    warm_s = seconds(partial(engine.warm_up, max(batches), DRAFT))
    weights, found = weight_bytes(decoder), {}
    for batch in batches:
        for context in contexts:
            floor = sum(weights + batch * token_bytes(config) * (context + i) for i in range(DRAFT)) / rate
            taken = ours(engine, batch, context)
            found[f"{batch}x{context}"] = {
                "floor_ms": round(1e3 * floor, 2), "ours_ms": round(1e3 * taken, 2),
                "ours_over_floor": round(taken / floor, 2),
            }  # fmt: skip
    more = {"warm_up_s": round(warm_s, 1), "mode": engine.mode, "peak_gib": peak_gib()}
    del engine, decoder
    clear()
    model = random_transformers(config)
    for name, case in found.items():
        batch, context = map(int, name.split("x"))
        draft = partial(generate, model, texts(batch, context, config.vocab_size), DRAFT)
        theirs = min(seconds(draft) for _ in range(2))
        case |= {"generate_ms": round(1e3 * theirs, 1),
                 "generate_over_ours": round(1e3 * theirs / case["ours_ms"], 1)}  # fmt: skip
        print(name, case, flush=True)
    del draft, model
    clear()
    return more | found


def ours(engine: Engine, batch: int, context: int) -> float:
    """Return the least seconds of a draft for conversations that have grown by a step since the last one."""
    requests = texts(batch, context - 4 * TURNS, engine.decoder.config.vocab_size)
    drafts = engine.draft(requests, DRAFT)
    times = []
    for turn in range(TURNS):
        requests = [[*r, *d[: turn % 4], 5] for r, d in zip(requests, drafts, strict=True)]
        synchronize()
        began = time.perf_counter()
        drafts = engine.draft(requests, DRAFT)  # it ends with the drafts on the host
        times.append(time.perf_counter() - began)
    return min(times)


def texts(batch: int, size: int, vocab: int) -> list[list[int]]:
    """Return random conversations that share nothing."""
    return [[(7_919 * row + 31 * place) % vocab for place in range(size)] for row in range(1, batch + 1)]


def beside(shape: str, batches: list[int], context: int) -> dict[str, Any]:
    """Time one shape beside what else transformers offers."""
    config = SHAPES[shape]
    engine = Engine(random_decoder(config), CONTEXT, slots=max(batches))
    found: dict[str, Any] = {f"{batch}x{context}": {"ours_ms": round(1e3 * ours(engine, batch, context), 2)}
                             for batch in batches}  # fmt: skip
    del engine
    clear()
    requests = {f"{batch}x{context}": texts(batch, context, config.vocab_size) for batch in batches}
    for name, kind, taken in others(config, requests, DRAFT):
        found[name] |= {f"{kind}_ms": round(1e3 * taken, 1),
                        f"{kind}_over_ours": round(1e3 * taken / found[name]["ours_ms"], 1)}
        print(kind, name, found[name], flush=True)
    return {"shape": shape} | found


class Generate:
    """What the server asks of an engine, by transformers' generate."""

    def __init__(self, config: ModelConfig) -> None:
        self.decoder, self.mode, self.slots = self, "generate", None
        self.config, self.model = config, random_transformers(config)

    def draft(self, requests: list[list[int]], count: int) -> list[list[int]]:
        """Draft for left-padded requests, from nothing."""
        drafts: list[list[int]] = generate(self.model, requests, count).tolist()
        return drafts


def serve(kind: str, config: ModelConfig, port: int) -> int:
    """Be the server: ours, around either engine."""
    settings = Settings(token_limit=config.vocab_size, context_tokens=CONTEXT, max_batch=SLOTS)
    engine: Any = Generate(config)
    if kind == "engine":
        engine = Engine(random_decoder(config), CONTEXT, slots=SLOTS)
        engine.warm_up(SLOTS, DRAFT)
    address = Address("127.0.0.1", port, "bench")
    sums = Sums("0" * 64, "0" * 64, None)
    code = asyncio.run(server.serve(engine, settings, address, sums, bind(address)))
    print(json.dumps({"peak_gib": peak_gib()}))
    return code


def replayed(kind: str, shape: str, conversations: int, limit_s: float) -> dict[str, Any]:
    """Replay against a server process, and return its figures and, where it was cut off, the whole's."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.serve", "--serve", kind, "--replayed", shape, "--port",
               str(port)]
    began = time.monotonic()
    tokens = TOKENS * conversations // CONVERSATIONS
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until_healthy(port, process)
            start_s = time.monotonic() - began
            plan = sizes(conversations, tokens, CONTEXT - 320)
            load = asyncio.run(replay(port, plan, SHAPES[shape].vocab_size, SLOTS, limit_s))
            drafting_s = metric(port, "drafter_draft_seconds_sum")
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=30)
    found = load.to_json() | {"start_s": round(start_s, 1), "drafting_s": round(drafting_s, 2)}
    found["whole_s"] = round(found["seconds"] * sum(wanted for _, wanted in plan) / load.tokens, 1)
    return found | (json.loads(said.splitlines()[-1]) if said.strip() else {})


def wait_until_healthy(port: int, process: "subprocess.Popen[str]") -> None:
    """Wait until the server answers, and no longer than it lives."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


def metric(port: int, name: str) -> float:
    """Return one of the server's figures."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main())
