"""Soak: twenty thousand requests, thirty-two in flight, of clients that behave and of clients that do not."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import malformed
import pytest
import torch
from alone import Alone, reference
from malformed import VOCAB
from serving import (
    CONTEXT,
    FEW,
    QUICK,
    SHALLOW,
    TOKEN_LIMIT,
    Server,
    Wire,
    figures,
    post,
    random_tensors,
    running,
    write_model,
)

from drafter.engine import Engine
from drafter.model import Decoder, build

COUNT, WARM, IN_FLIGHT = 20_000, 4_000, 32
TALKS, TURNS = 40, 5  # conversations, more of them than slots, and the requests of each
PATIENCE_S = 50  # the server's own promise
GROWN = 1.03  # of memory that is the process's own: so little that a request's ids may not be kept
# What a client does next, and how often of a thousand times.
WAYS = {"ask": 680, "ask twice at once": 60, "send slowly": 40, "read slowly": 20, "leave after asking": 70,
        "leave in mid-body": 70, "end in mid-body": 20, "ask what is wrong": 40}  # fmt: skip
GET = b"GET /metrics HTTP/1.1\r\nHost: drafter\r\n\r\n"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    tensors = {name: value.bfloat16() for name, value in random_tensors(SHALLOW).items()}
    return build(SHALLOW, tensors, torch.float32, "cpu")


@pytest.fixture
def served(decoder: Decoder, tmp_path: Path) -> Iterator[Server]:
    folder = write_model(tmp_path / "model", QUICK, SHALLOW, decoder.state_dict())
    with running(folder) as server:
        yield server


Known = list[tuple[list[int], list[int]]]  # requests of one conversation, each with its draft


def conversations(decoder: Decoder) -> list[Known]:
    """Conversations with the draft of each request made alone, and judged by transformers."""
    number, alone = random.Random(11), Alone(reference(decoder, "llama"), TOKEN_LIMIT)
    talks = []
    for _ in range(TALKS):
        text = [number.randrange(VOCAB) for _ in range(number.randint(1, CONTEXT - TURNS * (FEW + 1)))]
        known: Known = []
        for _ in range(TURNS):
            draft = Engine(decoder, CONTEXT, 1, TOKEN_LIMIT, FEW).draft([text], FEW)[0]
            assert alone.agrees(text, draft)
            known.append((text, draft))
            text = [*text, *draft[: number.randint(0, FEW)], number.randrange(TOKEN_LIMIT)]
        talks.append(known)
    assert alone.near_ties == 0
    return talks


def resident_bytes(process: int) -> int:
    """Resident memory without what is mapped from files, which is half of it and never grows."""
    return int(Path(f"/proc/{process}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


def open_files(process: int) -> int:
    return sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())


class Soak:
    """So many clients at once, each going on to its next request as soon as it is done with the last."""

    def __init__(self, server: Server, talks: list[Known]) -> None:
        self.url, self.process, self.talks = server.url, server.process.pid, talks
        self.number = random.Random(12)
        self.turns = [0] * len(talks)
        self.begun = 0
        self.done: Counter[str] = Counter()
        self.warm_bytes = 0

    async def run(self) -> None:
        await asyncio.gather(*(self.client() for _ in range(IN_FLIGHT)))

    async def client(self) -> None:
        wire = await Wire.open(self.url)
        while self.begun < COUNT:
            way = self.number.choices(list(WAYS), list(WAYS.values()))[0]
            self.begun += 1 + (way == "ask twice at once")
            if not self.warm_bytes and self.begun > WARM:
                self.warm_bytes = resident_bytes(self.process)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    stays = await self.act(way, wire)
            except Exception as error:
                error.add_note(f"{way}, after {self.done}")
                raise
            self.done[way] += 1
            if not stays:
                wire.leave()
                wire = await Wire.open(self.url)
        wire.leave()

    def next_request(self) -> tuple[bytes, list[int]]:
        """The next turn of some conversation; after its last one it begins anew."""
        talk = self.number.randrange(len(self.talks))
        text, draft = self.talks[talk][self.turns[talk]]
        self.turns[talk] = (self.turns[talk] + 1) % TURNS
        return post(json.dumps({"tokens": text}).encode()), draft

    async def act(self, way: str, wire: Wire) -> bool:
        """Do it, and say whether the connection is good for another request."""
        sent, draft = self.next_request()
        body = sent.index(b"\r\n\r\n") + 4
        half = self.number.randrange(body, len(sent))
        match way:
            case "ask":
                await wire.send(sent)
                await self.drafted(wire, draft)
            case "ask twice at once":
                other = await Wire.open(self.url)
                await asyncio.gather(wire.send(sent), other.send(sent))
                await asyncio.gather(self.drafted(wire, draft), self.drafted(other, draft))
                other.leave()
            case "send slowly":
                await wire.send(sent[:20], sent[20:half], sent[half:], pause_s=0.02)
                await self.drafted(wire, draft)
            case "read slowly":
                await self.read_slowly(sent, draft)
            case "leave after asking":
                await wire.send(sent)
                await asyncio.sleep(self.number.choice([0, 0, 0.001, 0.01]))
                return False
            case "leave in mid-body":
                await wire.send(sent[:half])
                return False
            case "end in mid-body":
                await wire.send(sent[:half])
                wire.writer.write_eof()
                await wire.until_closed()
                return False
            case "ask what is wrong":
                await wire.send(self.number.choice(malformed.BODIES)(self.number).sent)
                answer = await wire.answer()
                assert answer is not None and answer[0] == 400, answer
        return True

    async def drafted(self, wire: Wire, draft: list[int]) -> None:
        answer = await wire.answer()
        assert answer is not None
        assert (answer[0], json.loads(answer[1])) == (200, {"draft": draft})
        self.done["drafts"] += 1

    async def read_slowly(self, sent: bytes, draft: list[int]) -> None:
        """Ask for a draft and much else at once, and take the answers in sips."""
        wire = await Wire.open(self.url, buffer_bytes=4096)
        await wire.send(sent + 20 * GET)
        await asyncio.sleep(0.05)
        await self.drafted(wire, draft)
        for _ in range(20):
            await asyncio.sleep(0.005)
            answer = await wire.answer()
            assert answer is not None and answer[0] == 200
        wire.leave()


def test_twenty_thousand_requests_leave_no_trace_and_lose_no_draft(served: Server, decoder: Decoder) -> None:
    talks = conversations(decoder)
    files, soak = open_files(served.process.pid), Soak(served, talks)
    asyncio.run(soak.run())
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE_S) as client:
        for known in talks:  # and now in peace: nothing that was left half-done is in anyone's way
            assert client.post("/draft", json={"tokens": known[0][0]}).json() == {"draft": known[0][1]}
        assert client.get("/health").status_code == 200
    grown = resident_bytes(served.process.pid) / soak.warm_bytes
    seen = figures(served.url)
    assert set(WAYS) < set(soak.done)
    assert soak.begun >= COUNT
    assert soak.done["drafts"] > 0.7 * COUNT
    assert seen['drafter_requests_total{outcome="drafted"}'] >= soak.done["drafts"] + TALKS
    assert seen['drafter_requests_total{outcome="disconnected"}'] > 100
    assert seen["drafter_empty_drafts_total"] == 0
    assert not any(value for name, value in seen.items() if name.startswith("drafter_failures_total"))
    assert grown < GROWN, f"resident memory has grown to {grown:.3f} of what it was after {WARM} requests"
    served.wait_until(lambda: open_files(served.process.pid) <= files)
    assert served.stop() == 0
