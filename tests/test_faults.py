"""Faults at every seam of a real server over TCP: what each costs, and how it goes on."""

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from outputs import PATH, child, edit, gone, served, write_output
from serving import answers, environment, free_port, running, write_model

from drafter.server import START_S

FAULTY = Path(__file__).with_name("faulty.py")
TOO_MUCH = [7, 11, 12, 13]  # as there
PROMPTS = [[row, 11, 12, 13] for row in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def faults(tmp_path):
    """The folder into which a test puts a fault's name."""
    made = tmp_path / "faults"
    made.mkdir()
    return made


def faulty(folder, faults, *altered):
    return running(folder, module=(str(FAULTY),), FAULTS=str(faults), ALTERED="\n".join(altered),
                   PYTHONPATH=str(FAULTY.parents[1]))  # fmt: skip


async def post(client, prompt, tries=1):
    """Ask for a draft as a client does that tries again when its connection breaks."""
    for left in reversed(range(tries)):
        try:
            answer = await client.post("/draft", json={"tokens": prompt})
            break
        except httpx.ConnectError:
            raise
        except httpx.TransportError:
            if not left:
                raise
    assert answer.status_code == 200, answer.text
    return answer.json()["draft"]


def asking(url):
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=START_S)


def drafts_of(url, prompts=PROMPTS):
    async def ask():
        async with asking(url) as client:
            return await asyncio.gather(*(post(client, prompt) for prompt in prompts))

    return asyncio.run(ask())


def count_of(url, row):
    """A figure of /metrics; 0 where it has none."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(row + " "))


def test_a_fault_of_one_step_costs_at_most_its_requests(folder, faults):
    with faulty(folder, faults) as server:
        sound = drafts_of(server.url)
        assert all(len(draft) == 16 for draft in sound)

        (faults / "raise").touch()
        assert drafts_of(server.url) == sound
        assert count_of(server.url, 'drafter_failures_total{kind="exception"}') == 1

        (faults / "memory").touch()
        assert drafts_of(server.url) == [*sound[:7], []]
        assert count_of(server.url, 'drafter_failures_total{kind="out_of_memory"}') >= 4
        assert count_of(server.url, "drafter_empty_drafts_total") == 1

        (faults / "memory").unlink()
        assert drafts_of(server.url) == sound
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        assert count_of(server.url, "drafter_empty_drafts_total") == 1
        assert [event["event"] for event in server.events()].count("step failed") == 2
        assert server.stop() == 0


def test_a_step_that_hangs_is_answered_in_time_seen_and_ends_the_process(folder, faults):
    with faulty(folder, faults, "app.ANSWER_S = 4", "server.PLAIN_STALL_S = 20") as server:
        drafts_of(server.url)
        (faults / "hang").touch()
        started = time.monotonic()
        assert drafts_of(server.url) == [[]] * 8
        assert 4 <= time.monotonic() - started < 20
        assert count_of(server.url, 'drafter_failures_total{kind="timeout"}') == 8
        statuses = [
            httpx.get(f"{server.url}/health{part}", trust_env=False).status_code
            for part in ("", "/ready", "/live")
        ]
        assert statuses == [503, 503, 200]
        assert server.process.wait(60) == 1
        assert "a step of" in server.log.read_text()


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """An output folder whose serve.sh starts the server with the seams."""
    folder = write_output(tmp_path_factory.mktemp("made") / "output")
    shutil.copy(FAULTY, folder)
    edit(folder / "drafter" / "supervisor.py", '"drafter.server"', '"faulty"')
    edit(folder / "drafter" / "supervisor.py", "LONGEST_PAUSE_S = 15", "LONGEST_PAUSE_S = 0")
    return folder


async def through(server, fault, sound):
    """Converse while a fault ends the server and the next takes over; return how many drafts were empty."""
    before, empty, after = child(server), 0, 0

    async def converse(client, row):
        nonlocal empty, after
        while after < 20:
            new = child(server) not in (before, 0)
            draft = await post(client, PROMPTS[row], tries=3)
            assert draft in (sound[row], []), draft
            empty += not draft
            after += new and bool(draft)

    async with asking(server.url) as client:
        talks = [asyncio.create_task(converse(client, row)) for row in range(8)]
        await asyncio.sleep(0.2)
        fault.touch()
        await asyncio.wait_for(asyncio.gather(*talks), 180)
    assert gone(before)
    return empty


def test_faults_that_stick_cost_a_restart_through_which_no_request_fails(output, faults, tmp_path):
    env = {"TMPDIR": str(tmp_path), "FAULTS": str(faults), "ALTERED": "server.DEAF_S = 10"}
    with served(output / "serve.sh", tmp_path / "log", **env) as server:
        server.wait_until_ready()
        sound = drafts_of(server.url)
        # Empty are those of the step, and the odd one that comes in as it ends.
        for fault, most_empty in (("poison", 10), ("task", 10), ("crash", 0), ("deaf", 0)):
            assert asyncio.run(through(server, faults / fault, sound)) <= most_empty
        log = server.log.read_text()
        assert log.count("starting it again") == 4
        for words in (
            "CUDA error: an illegal memory access",
            "LookupError: the batcher's task ends",
            "Fatal Python error: Segmentation fault",
            "Timeout (0:00:10)!",
        ):
            assert words in log
        assert server.stop() == 0


def test_sigterm_answers_what_was_accepted_and_takes_no_more(output, faults, tmp_path):
    env = {"TMPDIR": str(tmp_path), "FAULTS": str(faults)}
    with served(output / "serve.sh", tmp_path / "log", **env) as server:
        server.wait_until_ready()
        sound = drafts_of(server.url)
        (faults / "gate").touch()

        async def trial():
            async with asking(server.url) as client:
                steps = count_of(server.url, "drafter_batch_rows_count")
                waiting = [
                    asyncio.create_task(client.post("/draft", json={"tokens": prompt})) for prompt in PROMPTS
                ]
                while f"drafter_batch_rows_count {steps + 1}" not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait_for, '"stopping"')
                with pytest.raises(httpx.ConnectError):
                    while True:
                        # One that waited to be accepted as the listener closed is dropped.
                        with suppress(httpx.ReadError, httpx.RemoteProtocolError):
                            httpx.get(f"{server.url}/health", trust_env=False)
                (faults / "gate").unlink()
                return await asyncio.gather(*waiting)

        answers = asyncio.run(trial())
        assert [answer.status_code for answer in answers] == [200] * 8
        assert [answer.json()["draft"] for answer in answers] == sound
        assert answers[0].headers["connection"] == "close"
        assert server.process.wait(10) == 0


def test_sigterm_while_a_step_hangs_and_a_body_is_half_sent_ends_in_time(output, faults, tmp_path):
    altered = "app.KEEP_ALIVE_S = 1\nserver.GRACE_S = 2"
    env = {"TMPDIR": str(tmp_path), "FAULTS": str(faults), "ALTERED": altered}
    with served(output / "serve.sh", tmp_path / "log", **env) as server:
        server.wait_until_ready()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            while idle.recv(1000):  # until the keep-alive that is set is over
                pass
        (faults / "hang").touch()

        async def trial():
            async with asking(server.url) as client:
                waiting = asyncio.create_task(post(client, [1]))
                while (faults / "hang").exists():
                    await asyncio.sleep(0.01)
                assert await asyncio.to_thread(server.stop) == 0  # which waits for 10 s at most
                return await waiting

        with socket.create_connection((host, int(port)), timeout=10) as half:
            half.sendall(b"POST /draft HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
            assert asyncio.run(trial()) == []


HALVES = {
    "header": b"POST /draft HTT",
    "body": b"POST /draft HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
    "chunk": b"POST /draft HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n13\r\n{",
    "long body": b"POST /draft HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b"[" * 200_000,
    "body of another route": b"GET /health HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
}


def test_sigterm_while_requests_are_half_sent_ends_in_order_and_in_time(output, faults, tmp_path):
    env = {"TMPDIR": str(tmp_path), "FAULTS": str(faults), "ALTERED": "server.GRACE_S = 0.5"}
    with served(output / "serve.sh", tmp_path / "log", **env) as server:
        server.wait_until_ready()
        host, port = server.url.removeprefix("http://").split(":")
        halves = [socket.create_connection((host, int(port)), timeout=10) for _ in HALVES]
        for half, sent in zip(halves, HALVES.values(), strict=True):
            half.sendall(sent)
        drafts_of(server.url)  # all that was sent before has come in
        assert server.stop() == 0
        assert "did not go down" not in server.log.read_text()
        for half in halves:
            half.close()


def test_a_start_that_hangs_is_ended_and_the_next_does_without_kernels(output, faults, tmp_path):
    (faults / "stuck").touch()
    env = {"TMPDIR": str(tmp_path), "FAULTS": str(faults), "ALTERED": "server.START_S = 5"}
    with served(output / "serve.sh", tmp_path / "log", **env) as server:
        server.wait_until_ready()
        assert "Timeout (0:00:05)!" in server.log.read_text()
        assert "with code 1; starting it again in 0 s, without kernels and graphs" in server.log.read_text()
        assert server.stop() == 0


def test_a_start_whose_kernels_find_no_room_is_followed_by_one_without(output, faults, tmp_path):
    (faults / "full").touch()
    with served(output / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path), FAULTS=str(faults)) as server:
        server.wait_until_ready()
        said = server.log.read_text()
        assert "No space left on device" in said
        assert "with code 1; starting it again in 0 s, without kernels and graphs" in said
        assert server.stop() == 0


def test_a_log_that_nobody_reads_holds_up_neither_answers_nor_a_restart(output, faults, tmp_path):
    """Not even the trace of a server whose event loop stands still, which is written before it ends."""
    url = f"http://127.0.0.1:{(port := str(free_port()))}"
    env = environment(PATH=PATH, HOST="127.0.0.1", PORT=port, TMPDIR=str(tmp_path), FAULTS=str(faults),
                      ALTERED="server.DEAF_S = 10")  # fmt: skip
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(["bash", str(output / "serve.sh")], cwd="/", env=env, stderr=writer)
    try:
        os.set_blocking(reader, False)
        while not answers(url):
            assert process.poll() is None
            time.sleep(0.05)
        sound = drafts_of(url, [[5]])
        (faults / "memory").touch()
        for _ in range(40):
            assert drafts_of(url, [TOO_MUCH, [5]]) == [[], *sound]
        (faults / "memory").unlink()
        (faults / "deaf").touch()
        with pytest.raises(httpx.TransportError):
            drafts_of(url, [[5]])
        assert drafts_of(url, [[5]]) == sound
        assert 2000 < len(os.read(reader, 1 << 20)) <= 4096  # it was full
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        os.close(reader)
        os.close(writer)
