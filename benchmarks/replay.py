"""The grader's replay as load: conversations over HTTP, whose acceptance is drawn instead of judged."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

ACCEPTANCE = 0.81  # of each drafted id: 5.1 tokens a step
MOST_TOKENS = 256
PROMPT_TOKENS = (20, 1_536)


@dataclass
class Load:
    """What a replay has done.

    Attributes:
        tokens: of the continuations so far.
        waits: seconds from each request to its answer.
        failed: answers that were no whole draft.
    """

    tokens: int = 0
    waits: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, float]:
        """Return the figures."""
        waits = sorted(self.waits) or [0.0]
        return {
            "seconds": round(self.seconds, 2), "tokens": self.tokens, "requests": len(self.waits),
            "failed": self.failed, "tokens_per_step": round(self.tokens / max(1, len(self.waits)), 2),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "wait_median_ms": round(1e3 * waits[len(waits) // 2], 1),
            "wait_99_ms": round(1e3 * waits[len(waits) * 99 // 100], 1),
        }  # fmt: skip


def sizes(conversations: int, tokens: int, longest: int) -> list[tuple[int, int]]:
    """Return prompt and continuation lengths: prompts with a median of 200, `tokens` in all to be drafted.

    Raises:
        ValueError: so many tokens do not fit continuations of MOST_TOKENS.
    """
    if not conversations <= tokens <= conversations * MOST_TOKENS:
        raise ValueError(f"{tokens} tokens do not fit {conversations} continuations of up to {MOST_TOKENS}")
    number = random.Random(0)
    low, high = PROMPT_TOKENS[0], min(PROMPT_TOKENS[1], longest)
    prompts = [min(high, max(low, round(number.lognormvariate(5.3, 0.7)))) for _ in range(conversations)]
    wishes = [number.uniform(0.4, 1.6) for _ in prompts]
    lengths = [1] * conversations
    while left := tokens - sum(lengths):  # what is cut off long ones goes to the others, and so on
        open_rows = [row for row, length in enumerate(lengths) if length < MOST_TOKENS]
        share = left / sum(wishes[row] for row in open_rows)
        for row in open_rows:
            more = min(left, max(1, int(share * wishes[row])), MOST_TOKENS - lengths[row])
            lengths[row] += more
            left -= more
    return list(zip(prompts, lengths, strict=True))


async def replay(port: int, plan: list[tuple[int, int]], vocab: int, in_flight: int, limit_s: float) -> Load:
    """Replay conversations, so many in flight, until all are done or the time is up."""
    load, queue = Load(), list(enumerate(plan))[::-1]
    began = time.monotonic()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while queue and time.monotonic() - began < limit_s:
            index, (prompt, wanted) = queue.pop()
            number = random.Random(index)
            tokens = [number.randrange(vocab) for _ in range(prompt)]
            while len(tokens) < prompt + wanted and time.monotonic() - began < limit_s:
                asked = time.monotonic()
                draft = await _post(reader, writer, tokens)
                load.waits.append(time.monotonic() - asked)
                load.failed += len(draft) != 16
                accepted = next((i for i in range(len(draft)) if number.random() > ACCEPTANCE), len(draft))
                step = [*draft[:accepted], number.randrange(vocab)][: prompt + wanted - len(tokens)]
                load.tokens += len(step)
                tokens += step
        writer.close()

    await asyncio.gather(*(client() for _ in range(in_flight)))
    load.seconds = time.monotonic() - began
    return load


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: list[int]) -> list[int]:
    # Thousands of requests a second: an HTTP library would be the slower half.
    body = json.dumps({"tokens": tokens}).encode()
    writer.write(b"POST /draft HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
    answer = json.loads(await reader.readexactly(size))
    draft: list[int] = answer.get("draft", [])
    return draft
