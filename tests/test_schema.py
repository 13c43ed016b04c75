"""Whatever is sent: schemathesis on the server's own description, and ten thousand malformed requests."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import malformed
import pytest
from malformed import VOCAB, Malformed
from serving import CONTEXT, FEW, QUICK, SHALLOW, Server, Wire, figures, post, running, write_model

TESTS = Path(__file__).resolve().parent
COUNT, SENDERS, NEIGHBOURS, LONGEST_S = 10_000, 8, 8, 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(write_model(tmp_path_factory.mktemp("served") / "model", QUICK, SHALLOW)) as server:
        yield server


def test_schemathesis_finds_nothing_that_the_server_does_not_say_of_itself(
        served: Server, tmp_path: Path) -> None:
    """All its checks, with what fits the description and with what does not."""
    command = [
        Path(sys.executable).parent / "schemathesis", "run", f"{served.url}/openapi.json", "--no-color",
        "--phases=examples,coverage,fuzzing", "--max-examples=100", "--continue-on-failure",
        "--generation-database=none", f"--request-timeout={LONGEST_S}",
    ]  # fmt: skip
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "whole_numbers", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    tried = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert tried is not None, done.stdout
    assert int(tried[1]) == int(tried[2]) > 100


async def status(wire: Wire, one: Malformed) -> int | None:
    """Send a malformed request and return what answers it; of an unfinished one, that the server lets go."""
    await wire.send(one.sent)
    if not one.statuses:
        wire.writer.write_eof()
        await wire.until_closed()
        return None
    answer = await wire.answer()
    assert answer is not None, one  # hung up without a word
    assert answer[0] >= 500 or len(json.loads(answer[1])["error"]) > 5, (one, answer)
    return answer[0]


class Trial:
    """Malformed requests by some senders, and beside them neighbours that ask what has known answers."""

    def __init__(self, url: str, requests: list[Malformed], known: list[tuple[bytes, bytes]]) -> None:
        self.url, self.requests, self.known = url, requests, known
        self.answered: Counter[tuple[str, int | None]] = Counter()
        self.valid = 0

    async def run(self) -> None:
        neighbours = [asyncio.create_task(self.ask(number)) for number in range(NEIGHBOURS)]
        try:
            await asyncio.gather(*(self.torment() for _ in range(SENDERS)))
        finally:
            self.requests.clear()
        await asyncio.gather(*neighbours)

    async def torment(self) -> None:
        wire = await Wire.open(self.url)
        while self.requests:
            one = self.requests.pop()
            async with asyncio.timeout(LONGEST_S):
                found = await status(wire, one)
            assert found is None or found in one.statuses, (found, one.kind, one.sent[:300])
            self.answered[one.kind, found] += 1
            if one.last:
                wire.leave()
                wire = await Wire.open(self.url)
        wire.leave()

    async def ask(self, number: int) -> None:
        wire, pick = await Wire.open(self.url), random.Random(number)
        while self.requests:
            request, expected = pick.choice(self.known)
            async with asyncio.timeout(LONGEST_S):
                await wire.send(request)
                assert await wire.answer() == (200, expected)
            self.valid += 1
        wire.leave()


def test_ten_thousand_malformed_requests_are_refused_and_disturb_nobody(served: Server) -> None:
    """Each is answered in time with a status of its kind; neighbours get what they got without the noise."""
    pick = random.Random(2)
    texts = [[pick.randrange(VOCAB) for _ in range(pick.randint(1, 2 * CONTEXT))] for _ in range(40)]
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
        calm = [client.post("/draft", json={"tokens": text}) for text in texts]
    assert all(answer.status_code == 200 and len(answer.json()["draft"]) == FEW for answer in calm)
    known = [(post(json.dumps({"tokens": text}).encode()), answer.content)
             for text, answer in zip(texts, calm, strict=True)]  # fmt: skip
    before = figures(served.url)
    trial = Trial(served.url, malformed.requests(COUNT, seed=1), known)
    asyncio.run(trial.run())
    after = figures(served.url)
    assert sum(trial.answered.values()) == COUNT
    assert len({kind for kind, _ in trial.answered}) >= len(malformed.MAKERS) // 3
    assert trial.valid > 5 * NEIGHBOURS
    drafted = 'drafter_requests_total{outcome="drafted"}'
    assert after[drafted] - before[drafted] == trial.valid  # nothing malformed reached the model
    assert after["drafter_empty_drafts_total"] == before["drafter_empty_drafts_total"] == 0
    assert not any(value for name, value in after.items() if name.startswith("drafter_failures_total"))
    assert httpx.get(f"{served.url}/health", trust_env=False).status_code == 200
