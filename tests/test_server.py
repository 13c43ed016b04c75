"""The server: a real process over real TCP, with a real engine over a tiny random drafter."""

import asyncio
import http.client
import json
import random
import socket
import subprocess
import sys
import time

import httpx
import pytest
from serving import (
    CONFIG,
    CONTEXT,
    ROOT,
    SERVING,
    TOKEN_LIMIT,
    failed,
    figures,
    free_port,
    post,
    running,
    write_model,
    write_sums,
)

from drafter import app, connections, listener, loading, logs, server, supervisor, weights
from drafter.app import Service
from drafter.batcher import Batcher
from drafter.engine import Engine
from drafter.limits import Limits
from drafter.metrics import Metrics
from drafter.model import build
from drafter.settings import Address, Settings, Sums

VOCAB = CONFIG.vocab_size
DIGITS = str(10**22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(folder):
    with running(folder) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def alone(folder):
    """What the engine drafts for a request that has it for itself, with nothing cached."""
    config, tensors = weights.load(folder / "model.safetensors")
    decoder = build(config, tensors, dtype=weights.torch.float32, device="cpu")

    def draft(tokens):
        return Engine(decoder, CONTEXT, slots=1, token_limit=TOKEN_LIMIT).draft([list(tokens)])[0]

    return draft


@pytest.fixture
def client(served):
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as made:
        yield made


def prompts(count, seed, longest=CONTEXT - 16):
    pick = random.Random(seed)
    return [[pick.randrange(VOCAB) for _ in range(pick.randint(1, longest))] for _ in range(count)]


def body(tokens):
    return json.dumps({"tokens": tokens}).encode()


def refused(answer, *statuses):
    assert answer.status_code in (statuses or (400,)), answer.text
    sentence = answer.json()["error"]
    assert len(sentence) > 10
    return sentence


BAD = {
    "empty": b"",
    "spaces": b" \n",
    "no json": b"tokens",
    "cut": b'{"tokens": [1, 2',
    "two": b'{"tokens": [1]} 2',
    "latin": b'{"tokens": [1], "\xe9": 1}',
    "bom": b"\xef\xbb\xbf" + body([1]),
    "utf-16": body([1]).decode().encode("utf-16"),
    "zero byte": body([1]) + b"\0",
    "list": b"[1]",
    "number": b"1",
    "string": b'"tokens"',
    "null": b"null",
    "true": b"true",
    "no key": b"{}",
    "other key": b'{"token": [1]}',
    "key twice": b'{"tokens": [1], "tokens": [2]}',
    "other key twice": b'{"tokens": [1], "a": 1, "a": 1}',
    "null tokens": b'{"tokens": null}',
    "string tokens": b'{"tokens": "1 2"}',
    "object tokens": b'{"tokens": {"0": 1}}',
    "number tokens": b'{"tokens": 1}',
    "no tokens": body([]),
    "negative": body([-1]),
    "vocab": body([VOCAB]),
    "2**63": body([1, 2**63]),
    "-2**63": body([-(2**63)]),
    "23 digits": body([int(DIGITS)]),
    "bool": b'{"tokens": [1, true]}',
    "false": b'{"tokens": [false]}',
    "float": b'{"tokens": [1, 2.0]}',
    "exponent": b'{"tokens": [1e0]}',
    "nan": b'{"tokens": [1, NaN]}',
    "infinity": b'{"tokens": [-Infinity]}',
    "1e400": b'{"tokens": [1e400]}',
    "null in list": b'{"tokens": [null]}',
    "string in list": b'{"tokens": ["1"]}',
    "nested": b'{"tokens": [[1]]}',
    "object in list": b'{"tokens": [{}]}',
    "hex": b'{"tokens": [0x1]}',
    "leading zero": b'{"tokens": [01]}',
    "5,000 digits": b'{"tokens": [' + b"1" * 5000 + b"]}",
    "deep list": b"[" * 60_000,
    "deep whole": b"[" * 40_000 + b"]" * 40_000,
    "deep objects": b'{"a":' * 15_000,
    "deep tokens": b'{"tokens":' + b"[" * 60_000,
    "comment": b'{"tokens": [1] /* */}',
    "trailing comma": b'{"tokens": [1,]}',
    "single quotes": b"{'tokens': [1]}",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_body_is_refused_with_a_sentence(client, kind):
    sentence = refused(client.post("/draft", content=BAD[kind]))
    assert len(sentence) < 200


def test_the_sentence_names_what_is_wrong(client):
    assert f"tokens[2] is {VOCAB}; ids run from 0 to {VOCAB - 1}" in refused(
        client.post("/draft", content=body([1, 2, VOCAB]))
    )
    assert "tokens[1] must be an integer, not a boolean (true)" in refused(
        client.post("/draft", content=BAD["bool"])
    )
    assert "100000 bytes" in refused(client.post("/draft", content=b"[" * 100_001), 413)
    assert "POST /draft" in refused(client.get("/nothing"), 404)
    assert "GET is not allowed on /draft" in refused(client.get("/draft"), 405)
    refused(client.post("/health", content=b"x"), 405)
    assert "header" in refused(client.get("/health", headers={"x": "y" * 10_000}), 413)


def all_at_once(url, requests):
    async def trial():
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            return await asyncio.gather(
                *(client.post("/draft", json={"tokens": tokens}) for tokens in requests)
            )

    answers = asyncio.run(trial())
    assert [answer.status_code for answer in answers] == [200] * len(requests)
    return [answer.json()["draft"] for answer in answers]


def test_32_at_once_get_what_each_gets_alone(served, client, alone):
    requests = prompts(32, seed=3)
    drafts = all_at_once(served.url, requests)
    assert drafts == [alone(tokens) for tokens in requests]
    assert all(len(draft) == 16 and max(draft) < TOKEN_LIMIT for draft in drafts)
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    rows = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert rows["drafter_batch_rows_sum"] > rows["drafter_batch_rows_count"]
    assert rows['drafter_requests_total{outcome="drafted"}'] >= 32
    assert rows["drafter_empty_drafts_total"] == 0


def test_metrics_tell_what_is_reused_and_how_drafts_are_made(client):
    def figures():
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
        assert sum(line.startswith('drafter_engine_info{mode="') for line in lines) == 1
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = figures()
    request = prompts(1, seed=77)[0] + [1]
    draft = client.post("/draft", content=body(request)).json()["draft"]
    client.post("/draft", content=body([*request, *draft[:5]]))
    after = figures()
    assert after["drafter_prefix_hits_total"] >= before["drafter_prefix_hits_total"] + 1
    reused = after["drafter_reused_tokens_total"] - before["drafter_reused_tokens_total"]
    assert reused >= len(request) + 4  # of the five that were accepted, the last one runs again


@pytest.mark.parametrize(
    "length", [CONTEXT - 17, CONTEXT - 16, CONTEXT - 15, CONTEXT - 1, CONTEXT, CONTEXT + 1, 5000]
)
def test_the_neighbours_of_a_long_request_are_undisturbed(served, alone, length):
    pick = random.Random(length)
    long = [pick.randrange(VOCAB) for _ in range(length)]
    neighbours = prompts(31, seed=length)
    first, *rest = all_at_once(served.url, [long, *neighbours])
    assert rest == [alone(tokens) for tokens in neighbours]
    assert first == alone(long)
    assert 1 <= len(first) <= 16


def test_an_embedding_without_a_token_is_taken_and_never_proposed(client):
    for token in range(TOKEN_LIMIT, VOCAB):
        answer = client.post("/draft", json={"tokens": [token] * 3, "more": "is ignored"})
        assert answer.status_code == 200
        assert max(answer.json()["draft"]) < TOKEN_LIMIT


def test_a_chunked_body_and_a_client_that_leaves(served, client):
    answer = client.post("/draft", content=iter([b'{"tok', b'ens": [1, ', b"2]}"]))
    assert len(answer.json()["draft"]) == 16
    host, port = served.url.removeprefix("http://").split(":")
    for sent in (
        b"POST /draft HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
        b"POST /draft HTTP/1.1\r\nContent-Length: 15\r\n\r\n" + body([1]),
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(sent)
    for rubbish in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"POST /draft HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(rubbish)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert client.post("/draft", content=body([1])).status_code == 200


def test_a_pooled_connection_lasts_through_pauses_and_refusals(served):
    host, port = served.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.connect()
    kept = connection.sock
    for index in range(30):
        connection.request("POST", "/draft", body=body([1]) if index % 3 else b"[")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == (200 if index % 3 else 400)
        time.sleep(0.02 if index else 1.5)
        assert connection.sock is kept
    connection.close()


def test_what_is_served_is_named(folder, served, client):
    version = client.get("/version").json()
    sums = Sums.check(folder)
    assert version == {"model": "submission", "weights_sha256": sums.weights,
                       "serving_sha256": sums.serving, "sums_sha256": sums.sums}  # fmt: skip
    assert [client.get(path).status_code for path in ("/health", "/health/live", "/health/ready")] == [
        200
    ] * 3
    events = [event["event"] for event in served.events()]
    assert events[:3] == ["weights loaded", "warmed up", "listening"]
    assert "request" not in events


def altered(folder, *lines, **env):
    """Run a server whose Python was altered before `main`."""
    code = "\n".join(
        [
            "import functools, os, sys, time",
            "from drafter import app, server",
            "from drafter.engine import Engine",
            *lines,
            "sys.exit(server.main())",
        ]
    )
    return running(folder, module=("-c", code), **env)


GATED = (
    "draft = Engine.draft",
    "def gated(*arguments):",
    "    while os.path.exists(os.environ['GATE']): time.sleep(0.01)",
    "    return draft(*arguments)",
    "Engine.draft = gated",
)


def test_more_than_may_be_in_flight_are_told_when_to_come_again(folder, tmp_path):
    gate = tmp_path / "gate"
    bound = "server.Limits = functools.partial(server.Limits, max_waiting=4)"
    with altered(folder, *GATED, bound, GATE=str(gate)) as held:
        gate.touch()

        async def trial():
            async with httpx.AsyncClient(base_url=held.url, trust_env=False, timeout=30) as client:
                tasks = [
                    asyncio.create_task(client.post("/draft", json={"tokens": [row]})) for row in range(9)
                ]
                while sum(task.done() for task in tasks) < 5:
                    await asyncio.sleep(0.01)
                gate.unlink()
                return await asyncio.gather(*tasks), (await client.get("/metrics")).text

        answers, text = asyncio.run(trial())
        drafted = [answer for answer in answers if answer.status_code == 200]
        assert [len(answer.json()["draft"]) for answer in drafted] == [16] * 4
        for answer in answers:
            if answer not in drafted:
                assert "4 requests are in flight" in refused(answer, 429)
                assert answer.headers["retry-after"] == "1"
        assert 'drafter_requests_total{outcome="busy"} 5.0' in text


def test_a_request_is_one_line_at_debug_and_none_at_info(folder, served):
    def said(asked):
        before = asked.log.read_text()
        for content in (body([444, 443, 442]), body([444, 9_999_999]), b"[" * 200_000):
            httpx.post(f"{asked.url}/draft", content=content, trust_env=False)
        return asked.log.read_text().removeprefix(before)

    assert said(served) == ""
    with running(folder, "--log-level", "debug") as talkative:
        lines = said(talkative).splitlines()
    told = [json.loads(line) for line in lines]
    assert [(line["event"], line["outcome"], line["tokens"], line["drafted"]) for line in told] == [
        ("request", "drafted", 3, 16),
        ("request", "refused", 0, 0),
        ("request", "too_large", 0, 0),
    ]
    assert not any(token in "".join(lines) for token in ("444", "9999999"))


def test_a_broken_engine_answers_turns_unready_and_ends_the_process(folder, tmp_path):
    gate = tmp_path / "gate"
    lines = (
        "draft = Engine.draft",
        "def broken(*arguments):",
        "    if os.path.exists(os.environ['GATE']): raise RuntimeError('a fault for the test')",
        "    return draft(*arguments)",
        "Engine.draft = broken",
        "app.ANSWER_S, app.BODY_S = 20.0, 3.0",
        # All eight in one step: who comes later waits for the engine, or its end.
        "server.Limits = functools.partial(server.Limits, linger_s=0.5, linger_most_s=0.5, probe_s=0.2,"
        " broken_s=15.0)",
    )
    with altered(folder, *lines, GATE=str(gate)) as broken:
        with httpx.Client(base_url=broken.url, trust_env=False, timeout=30) as client:
            host, port = broken.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(b"POST /draft HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
                assert connection.recv(1000).startswith(b"HTTP/1.1 408")
            gate.touch()
            started_s = time.monotonic()
            assert all_at_once(broken.url, [[row] for row in range(8)]) == [[]] * 8
            assert time.monotonic() - started_s < 15
            assert client.get("/health").status_code == client.get("/health/ready").status_code == 503
            assert client.get("/health/live").status_code == 200
            text = client.get("/metrics").text
            assert 'drafter_requests_total{outcome="empty"} 8.0' in text
            assert "drafter_empty_drafts_total 8.0" in text
        assert broken.process.wait(60) == 1
        assert "a fault for the test" in broken.log.read_text()


def test_the_limits_are_these_and_each_leaves_room_for_the_next(folder):
    settings, sums, limits = Settings.read(folder), Sums.check(folder), Limits()
    batcher = Batcher(lambda requests, count: [], limits, Metrics())
    made = Service(settings, Address("", 0, ""), sums, VOCAB, batcher).app()
    made.unregister_app(made)
    config = made.config
    assert (app.BODY_S, app.ANSWER_S, config.REQUEST_TIMEOUT, config.RESPONSE_TIMEOUT) == (30, 50, 60, 75)
    assert (app.KEEP_ALIVE_S, config.KEEP_ALIVE_TIMEOUT) == (180, 180)  # more than two minutes
    assert (limits.max_batch, limits.max_waiting, connections.BACKLOG) == (32, 256, 256)
    assert connections.OTHER_FILES > 2 * connections.BACKLOG
    # Who gives up after 60 s has an answer by then, or an end of the connection and time to ask again.
    assert server.DEAF_S <= app.ANSWER_S / 2
    assert app.ANSWER_S < server.STALL_S < server.PLAIN_STALL_S < server.START_S < supervisor.STEADY_S
    assert server.STALL_S == 60 and server.START_S + 60 <= 300
    down_s = 2 * server.ARRIVAL_S + server.GRACE_S + server.LAST_WORDS_S
    assert down_s + 1 < supervisor.STOP_S < 10


def test_head_is_answered_as_get_is_without_content(served, client):
    for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == client.get(path).headers["content-type"]
    assert client.head("/draft").status_code == 405


def test_events_do_not_wait_for_a_pipe_that_nobody_reads():
    code = "from drafter import logs; logs.configure('info'); [logs.event(30, 'x' * 99) for _ in range(9999)]"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 0
        assert process.stderr.read(100).startswith(b'{"time": ')


def test_files_without_sums_are_told_of(folder, tmp_path, capfd):
    copy = write_model(tmp_path / "copy")
    logs.configure("info")
    Sums.check(copy)
    assert capfd.readouterr().err == ""
    (copy / "SHA256SUMS").unlink()
    Sums.check(copy)
    line, = capfd.readouterr().err.splitlines()
    assert json.loads(line)["level"] == "warning" and "SHA256SUMS is missing" in json.loads(line)["reason"]


def test_idle_connections_beyond_what_there_are_files_for_make_room(folder):
    """Where the hard limit of open files is low, too; what is half sent is let go like what is idle."""
    lines = (
        "import resource",
        "from drafter import connections",
        "connections.BACKLOG, connections.OTHER_FILES = 64, 180",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 260))",
    )
    with altered(folder, *lines) as few:
        host, port = few.url.removeprefix("http://").split(":")
        silent = []
        with httpx.Client(base_url=few.url, trust_env=False, timeout=10) as client:
            assert client.post("/draft", content=body([1])).status_code == 200
            kept, = client._transport._pool.connections
            for number in range(400):
                silent.append(socket.create_connection((host, int(port)), timeout=10))
                silent[-1].sendall(b"POST /dra" * (number % 2))
                if number % 10 == 0:  # a client in use is not one that is silent
                    assert client.post("/draft", content=body([1])).status_code == 200
            assert client._transport._pool.connections == [kept]
            assert httpx.post(f"{few.url}/draft", content=body([2]), trust_env=False).status_code == 200
        assert len(few.events()) == 3  # and not one of them of a file too many
        for connection in silent:
            connection.close()
        assert few.stop() == 0


def test_a_burst_of_clients_takes_the_place_of_silent_connections_and_not_of_each_other(folder):
    lines = (
        "import resource",
        "from drafter import connections",
        "connections.BACKLOG, connections.OTHER_FILES = 64, 180",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 220))",
    )
    with altered(folder, *lines) as few:
        warning, = (event for event in few.events() if event["event"] == "few connections")
        assert warning["most"] == 40 and "this process may open 220 files; allow it 244" in warning["reason"]
        host, port = few.url.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(45)]
        for _ in range(3):
            burst = [socket.create_connection((host, int(port)), timeout=10) for _ in range(32)]
            for client in burst:
                client.sendall(post(body([1, 2, 3]), "Connection: close"))
            answers = [client.makefile("rb").read() for client in burst]
            assert [answer.startswith(b"HTTP/1.1 200") for answer in answers] == [True] * 32
            for client in burst:
                client.close()
        for connection in silent:
            connection.close()
        assert few.stop() == 0


def test_long_prompts_that_begin_together_take_turns_and_go_on_together(folder):
    texts = [[*range(row, row + 70)] for row in range(0, 400, 25)]
    with altered(folder, "server.PLAIN_NEW_TOKENS = 150") as held:

        def steps():
            return figures(held.url)["drafter_batch_rows_count"]

        before = steps()
        drafts = all_at_once(held.url, texts)
        assert steps() - before >= len(texts) / 2  # of 70 ids each, two in one step
        before = steps()
        all_at_once(held.url, [[*text, *draft[:3], 5] for text, draft in zip(texts, drafts, strict=True)])
        assert steps() - before < len(texts) / 4


def test_what_a_request_has_new_is_counted_from_what_it_is_drafted_from(folder):
    config, tensors = weights.load(folder / "model.safetensors")
    decoder = build(config, tensors, dtype=weights.torch.float32, device="cpu")
    engine = Engine(decoder, CONTEXT, slots=2, token_limit=TOKEN_LIMIT)
    unread = engine.unread
    text = list(range(2 * CONTEXT + 5))
    assert unread(text[:40]) == 40
    draft = engine.draft([text[:40]])[0]
    assert unread([*text[:40], *draft[:5], 499]) == 1
    assert unread([7, *text[:40]]) == 41
    assert 0 < unread(text) <= CONTEXT
    engine.draft([text])
    assert unread([*text, 3]) == 1


def test_a_missing_folder_ends_the_process_with_2_and_one_sentence(tmp_path):
    result = failed(tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "serving.json is missing" in result.stderr


@pytest.fixture
def ended(folder, tmp_path, monkeypatch, capsys):
    """Run `main` in this process over a copy that was damaged; return its code and what it said."""
    monkeypatch.setattr(server.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(server.logs, "configure", lambda level: None)
    monkeypatch.setenv("PORT", "0")

    def run(damage, keep_sums=True):
        copy = write_model(tmp_path / "copy")
        damage(copy)
        if not keep_sums:
            (copy / "SHA256SUMS").unlink()
        code = server.main(["--weights", str(copy)])
        return code, capsys.readouterr().err

    return run


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def serving_with(**changes):
    def damage(copy):
        (copy / "serving.json").write_text(json.dumps(SERVING | changes))
        write_sums(copy, ["model.safetensors", "serving.json"])

    return damage


def test_damaged_weights_are_named(ended):
    code, said = ended(lambda copy: flip(copy / "model.safetensors", -100))
    assert code == 2 and "model.safetensors: tensor model." in said and "is damaged" in said
    code, said = ended(lambda copy: flip(copy / "model.safetensors", 20))
    assert code == 2 and "model.safetensors" in said
    code, said = ended(lambda copy: flip(copy / "serving.json", -3))
    assert code == 2 and "serving.json" in said
    # Another model's whole file is told by the sum of the whole alone.
    code, said = ended(lambda copy: write_sums(copy, ["serving.json"]))
    assert code == 2 and "model.safetensors is damaged" in said and "SHA256SUMS says nothing of it" in said
    code, said = ended(lambda copy: (copy / "SHA256SUMS").write_bytes(b"\xff\n"))
    assert code == 2 and "SHA256SUMS is damaged" in said
    code, said = ended(lambda copy: (copy / "model.safetensors").unlink())
    assert code == 2 and "model.safetensors is missing" in said
    for damage in (
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:40],
        lambda data: b"",
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
    ):

        def rewrite(copy, damage=damage):
            path = copy / "model.safetensors"
            path.write_bytes(damage(path.read_bytes()))

        code, said = ended(rewrite, keep_sums=False)
        assert code == 2 and "model.safetensors" in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"draft_tokens": "16"}, "draft_tokens is '16'"),
        ({"draft_tokens": True}, "draft_tokens is True"),
        ({"dtype_cpu": "int8"}, "float32 and bfloat16"),
        ({"draft_token": 16}, "must hold token_limit"),
        ({"token_limit": 513}, "there are 512 embeddings"),
        ({"slots": 8}, "at least max_batch"),
        ({"slots": 10**20}, f"slots is {10**20}"),
        ({"context_tokens": 10**30}, f"context_tokens is {10**30}"),
    ],
)
def test_impossible_settings_are_named(ended, changes, sentence):
    code, said = ended(serving_with(**changes))
    assert code == 2 and sentence in said


def test_settings_nested_too_deeply_are_named(ended):
    code, said = ended(lambda copy: (copy / "serving.json").write_text(100_000 * "["))
    assert code == 2 and "serving.json cannot be read as JSON" in said


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "http"), ("PORT", "65536"), ("PORT", "-1"), ("HOST", "203.0.113.7")]
)
def test_an_impossible_address_is_named(ended, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    code, said = ended(lambda copy: None)
    assert code == 2 and value in said


def test_a_port_that_is_taken_while_the_weights_load_is_named(ended, monkeypatch):
    port = free_port()
    other = listener.bind(Address("127.0.0.1", port, ""))
    monkeypatch.setattr(loading, "warm_up", lambda engine, settings: other.listen())
    monkeypatch.setenv("PORT", str(port))
    code, said = ended(lambda copy: None)
    assert code == 2 and f"cannot listen on 127.0.0.1 port {port}" in said
    code, said = ended(lambda copy: None)  # and at once where it was taken before
    assert code == 2 and f"cannot listen on 127.0.0.1 port {port}" in said
    other.close()
