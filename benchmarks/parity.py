"""bench-parity: the engine that serves output/, in its own type, beside the same weights in float32.

Usage: python -m benchmarks.parity [--folder output] [--conversations build/smollm2/teacher/dev.jsonl]

Teacher-forced: at every position of every continuation the engine chooses one token, over slots in which
conversations have been cached, evicted and extended. Where it chooses otherwise than float32, the two best
logits of float32 must lie within EPSILON: rounding, not a stale slot. Then all conversations are replayed in
batches; tau must be that of float32's choices, simulated, to TAU_SHARE. Exit code 1 where either is not so.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import machine, write_results
from drafter import weights
from drafter.engine import Engine
from drafter.loading import open_engine
from drafter.model import Decoder, build
from drafter.replay import Conversation, Steps, read_conversations, rounds, simulate, summary
from drafter.settings import WEIGHTS, Settings

ROOT = Path(__file__).resolve().parent.parent
EPSILON = 0.5  # logits: on a CPU one choice of 6,086 differs at 0.34, all others under 0.25
TAU_SHARE = 0.005


def engine_choices(engine: Engine, conversations: Sequence[Conversation], batch: int) -> list[list[int]]:
    """Return the engine's greedy token at every position of every continuation."""
    found: list[list[int]] = [[] for _ in conversations]
    for start in range(0, len(conversations), batch):
        part = range(start, min(start + batch, len(conversations)))
        for position in range(max(len(conversations[index].continuation) for index in part)):
            rows = [index for index in part if position < len(conversations[index].continuation)]
            texts = [_before(conversations[index], position) for index in rows]
            for index, draft in zip(rows, engine.draft(texts, 1), strict=True):
                found[index] += draft
    return found


def _before(conversation: Conversation, position: int) -> list[int]:
    return [*conversation.prompt, *conversation.continuation[:position]]


@torch.inference_mode()
def exact_choices(decoder: Decoder, conversation: Conversation,
                  token_limit: int) -> tuple[list[int], list[float]]:
    """Return a decoder's greedy tokens at every position of a continuation, and by how much each was best."""
    text = [*conversation.prompt, *conversation.continuation[:-1]]
    device = decoder.head_weight.device
    hidden_td = decoder(torch.tensor([text], device=device), torch.arange(len(text), device=device)[None])[0]
    logits_tv: Tensor = decoder.logits(hidden_td[len(conversation.prompt) - 1 :])[:, :token_limit]
    best = logits_tv.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def replayed(engine: Engine, conversations: Sequence[Conversation], batch: int) -> list[Steps]:
    """Replay conversations, so many at a time; one that has ended makes room for the next."""
    waiting = list(enumerate(conversations))[::-1]
    loops: dict[int, Any] = {}
    texts: dict[int, list[int]] = {}
    found: dict[int, Steps] = {}
    while waiting or loops:
        while waiting and len(loops) < batch:
            index, one = waiting.pop()
            loops[index] = rounds(one.prompt, one.continuation)
            texts[index] = next(loops[index])
        drafts = engine.draft([texts[index] for index in loops])
        for index, draft in zip(list(loops), drafts, strict=True):
            try:
                texts[index] = loops[index].send(draft)
            except StopIteration as end:
                found[index] = end.value
                del loops[index]
    return [found[index] for index in range(len(conversations))]


def differences(engine: Engine, decoder: Decoder, conversations: Sequence[Conversation],
                batch: int) -> Iterator[tuple[bool, bool, float]]:
    """Yield for each position whether engine and float32 agree, whether float32 is right, and its margin."""
    chosen = engine_choices(engine, conversations, batch)
    for conversation, own in zip(conversations, chosen, strict=True):
        exact, margins = exact_choices(decoder, conversation, engine.token_limit)
        for mine, theirs, token, margin in zip(own, exact, conversation.continuation, margins, strict=True):
            yield mine == theirs, theirs == token, margin


def compare(engine: Engine, decoder: Decoder, conversations: Sequence[Conversation],
            batch: int) -> dict[str, Any]:
    """Return what the docstring above promises, as plain values."""
    rows = list(differences(engine, decoder, conversations, batch))
    margins = sorted(margin for agree, _, margin in rows if not agree)
    flags = iter([right for _, right, _ in rows])
    simulated = [simulate([next(flags) for _ in conversation.continuation]) for conversation in conversations]
    exact = summary(conversations, simulated).tau
    served = summary(conversations, replayed(engine, conversations, batch)).tau
    return {
        "mode": engine.mode, "positions": len(rows), "epsilon": EPSILON,
        "agree_share": round(1 - len(margins) / len(rows), 5),
        "largest_margin_at_a_difference": round(margins[-1], 4) if margins else 0.0,
        "beyond_epsilon": sum(margin > EPSILON for margin in margins),
        "tau_simulated_float32": round(exact, 4), "tau_replayed": round(served, 4),
        "tau_difference_share": round(served / exact - 1, 5),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Compare, and write benchmarks/results/parity-DEVICE.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "output", help="a submission (output/)")
    parser.add_argument("--conversations", type=Path, default=ROOT / "build/smollm2/teacher/dev.jsonl",
                        help="with continuations, one a line (the dev set of profile smollm2)")  # fmt: skip
    options = parser.parse_args(argv)
    try:
        settings = Settings.read(options.folder)
        conversations = [one for one in read_conversations(options.conversations) if one.continuation]
        engine = open_engine(options.folder, settings)
        config, tensors = weights.load(options.folder / WEIGHTS, engine.inference.device.type, torch.float32)
    except (OSError, ValueError) as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    engine.warm_up(settings.max_batch, settings.draft_tokens)
    decoder = build(config, tensors, torch.float32, engine.inference.device.type).eval()
    found = compare(engine, decoder, conversations, settings.max_batch)
    print(found)
    write_results("parity", machine("make bench-parity") | found | {"dtype": str(engine.inference.dtype)})
    return int(found["beyond_epsilon"] > 0 or abs(found["tau_difference_share"]) > TAU_SHARE)


if __name__ == "__main__":
    sys.exit(main())
