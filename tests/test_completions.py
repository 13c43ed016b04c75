"""Completion servers as the teacher: our own engine behind both protocols, and what a server may do wrong."""

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from completions_server import Body, Completions, completions
from mill import SIZE, STOP, Mill, finished, write_target
from safetensors import safe_open
from safetensors.torch import load_file
from workshop import Workshop

from drafter.engine import Engine, Generation
from stages.errors import UserError
from stages.job import Job
from stages.models.target import load_target
from stages.profile import Servers
from stages.training.shards import read_origin
from stages.wrapper.record import key_of, run_of
from stages.writers import openai
from stages.writers.contract import first_repeat

CAP, TOP_K = 12, 4
SETTINGS = Generation(CAP, (STOP,), TOP_K)
MODEL, KEY = "toy/Random-Llama", "sk-CANARYcanaryCANARY000"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder / "toy.gguf")
    return Engine(load_target(folder, "gguf", "float32", "cpu"), 256)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    number = random.Random(3)
    return [[number.randrange(3, SIZE.vocab_size) for _ in range(number.randint(4, 40))] for _ in range(16)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "FIRST_WAIT_S", 0.01)


def fleet(tmp_path: Path, *servers: Completions | str, **options: Any) -> openai.Fleet:
    addresses = tuple(one if isinstance(one, str) else one.address for one in servers)
    paths = dict.fromkeys(("out", "work", "root"), tmp_path)
    job = Job(stage="teacher", config=None, inputs={}, seed=0, device="cpu", log=tmp_path / "teacher.log",
              **paths)
    return openai.Fleet(Servers(addresses=addresses, **options), MODEL, SIZE.vocab_size, job)


@pytest.mark.parametrize(("protocol", "token_ids"), [("vllm", True), ("vllm", False), ("sglang", True)])
@pytest.mark.parametrize("repeat", [0, 2])
def test_rows_are_those_of_the_engine_itself(engine: Engine, prompts: list[list[int]], tmp_path: Path,
                                             protocol: str, token_ids: bool, repeat: int) -> None:
    settings = Generation(CAP, (STOP,), TOP_K, stop_on_repeat=repeat)
    expected = engine.generate(prompts, settings)
    with ExitStack() as stack:
        servers = [stack.enter_context(completions(engine, token_ids=token_ids)) for _ in range(2)]
        writer = fleet(tmp_path, *servers, protocol=protocol)
        found = writer.generate(prompts, settings)
        assert sorted(len(one.prompts) for one in servers)[0] > 0, "one server had it all"
        assert sorted(servers[0].prompts + servers[1].prompts) == sorted(prompts)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.ended) == (theirs.tokens, theirs.ended)
        assert torch.equal(ours.topk_ids, theirs.topk_ids)
        torch.testing.assert_close(ours.topk_logprobs, theirs.topk_logprobs, atol=1e-5, rtol=1e-5)
        assert (ours.topk_ids.dtype, ours.topk_logprobs.dtype) == (torch.int32, torch.float32)
    wanted = {"stop", "cap", "repeat"} if repeat else {"stop", "cap"}
    assert {row.ended for row in found} == wanted
    version = "0.28.0" if protocol == "vllm" else "0.5.9"
    assert writer.origin() == [
        {"address": one.address, "protocol": protocol, "model": MODEL, "version": version} for one in servers]


@pytest.mark.parametrize(("tokens", "size", "count"), [
    ([1, 2, 3, 1, 2, 3], 3, 3), ([1, 2, 3, 1, 2], 3, 5), ([7, 7, 7, 7], 2, 1), ([1, 2, 1, 2, 1], 2, 2),
    ([], 2, 0), ([1, 1, 1], 0, 3),
])
def test_a_continuation_is_cut_before_the_first_n_gram_that_recurs(
        tokens: list[int], size: int, count: int) -> None:
    assert first_repeat(tokens, size) == count


def choice(answer: Body) -> Body:
    return answer["choices"][0]


def without_ids(answer: Body) -> None:
    choice(answer)["token_ids"] = None
    choice(answer)["logprobs"]["tokens"] = ["a"] * len(choice(answer)["logprobs"]["tokens"])


def named_top(answer: Body) -> None:
    for top in choice(answer)["logprobs"]["top_logprobs"]:
        top["word"] = top.popitem()[1]


def other_top(answer: Body) -> None:
    for top in choice(answer)["logprobs"]["top_logprobs"]:
        top[f"token_id:{SIZE.vocab_size}"] = top.popitem()[1]


def second_best(answer: Body) -> None:
    top = choice(answer)["logprobs"]["top_logprobs"][0]
    names = list(top)
    top[names[0]], top[names[1]] = top[names[1]] - 1, top[names[0]]


def edit(*path: Any, to: Any) -> Callable[[Body], None]:
    def spoil(answer: Body) -> None:
        inner: Any = answer
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = to(inner[path[-1]]) if callable(to) else to

    return spoil


FIRST = ("choices", 0)
FAULTY: list[tuple[str, Callable[[Body], None], str]] = [
    ("vllm", without_ids, "returns no token ids (vLLM does from 0.10.2"),
    ("vllm", named_top, "returns no token ids in the top-k of position 0: it does not know return_tokens"),
    ("vllm", edit(*FIRST, "token_ids", to=lambda ids: [*ids, 7]), "gives one continuation as token_ids and"),
    ("vllm", edit(*FIRST, "prompt_token_ids", to=lambda ids: ids[1:]), "took the prompt for other token ids"),
    ("vllm", edit("usage", "prompt_tokens", to=1), "read 1 tokens of a prompt of "),
    ("vllm", edit("model", to="other/Model"), "answers as 'other/Model', where 'toy/Random-Llama' was"),
    ("vllm", edit(*FIRST, "logprobs", to=None), "returns no logprobs"),
    ("vllm", edit(*FIRST, "logprobs", "top_logprobs", to=None), "returns no logprobs"),
    ("vllm", edit(*FIRST, "logprobs", "top_logprobs", 0, to=None), "returns no logprobs at position 0"),
    ("vllm", edit(*FIRST, "logprobs", "top_logprobs", to=lambda tops: tops[:-1]), "gives logprobs of "),
    ("vllm", edit(*FIRST, "logprobs", "top_logprobs", 0, to=lambda top: dict(list(top.items())[:2])),
     "gives 2 logprobs at position 0, where 4 were asked for"),
    ("vllm", other_top, f"returns the id {SIZE.vocab_size}, and target.token_count is "),
    ("vllm", second_best, "did not choose the most likely token at position 0: it does not write greedily"),
    ("vllm", edit(*FIRST, "finish_reason", to="error"), "ended a continuation with 'error'"),
    ("vllm", edit(*FIRST, "finish_reason", to=None), "ended a continuation with 'no reason'"),
    ("vllm", edit(*FIRST, "token_ids", to=lambda ids: [*ids[:-1], True]), "choices.0.token_ids."),
    ("vllm", edit("choices", to=[]), "answers something else than was asked for: choices: "),
    ("sglang", edit("meta_info", "output_token_logprobs", to=None), "returns no logprobs"),
    ("sglang", lambda answer: answer.pop("output_ids") and answer["meta_info"].pop("output_token_logprobs"),
     "returns no token ids"),
    ("sglang", edit("meta_info", "output_top_logprobs", 0, to=None), "returns no logprobs at position 0"),
    ("sglang", edit("output_ids", to=lambda ids: [*ids, 7]), "gives one continuation as output_ids and"),
    ("sglang", edit("meta_info", "finish_reason", "type", to="abort"), "ended a continuation with 'abort'"),
    ("sglang", edit("meta_info", to="?"), "answers something else than was asked for: meta_info"),
]


@pytest.mark.parametrize(("protocol", "spoil", "sentence"), FAULTY, ids=map(str, range(len(FAULTY))))
def test_an_answer_that_breaks_the_contract_is_refused_with_a_sentence(
        engine: Engine, tmp_path: Path, protocol: str, spoil: Callable[[Body], None], sentence: str) -> None:
    with completions(engine, spoil=spoil) as held:
        with pytest.raises(UserError) as caught:
            fleet(tmp_path, held, protocol=protocol).generate([[5, 6, 7]], SETTINGS)
        assert str(caught.value).startswith(f"{held.address} ")
        assert sentence in str(caught.value)
        assert len(held.asked) == 1, "what a wrong server says does not get better"


@pytest.mark.parametrize(("tokens", "finish", "sentence"), [
    ([7, 8], "length", "ended for its length after 2 tokens of 12: it takes too short a context"),
    ([7, 8], "stop", "stopped at the id 8, which target.stop_ids does not have"),
    ([7, STOP, 8], "length", f"writes on after the stop id {STOP}"),
    ([], "length", "returns an empty continuation"),
    ([9] * 13, "length", "returns 13 tokens, where 12 are the most"),
])
def test_an_end_unlike_the_contracts_is_refused(
        engine: Engine, tmp_path: Path, tokens: list[int], finish: str, sentence: str) -> None:
    def spoil(answer: Body) -> None:
        tops = [[[-0.1 - rank, token + rank, None] for rank in range(TOP_K)] for token in tokens]
        answer["output_ids"] = tokens
        answer["meta_info"] |= {"output_token_logprobs": [top[0] for top in tops],
                                "output_top_logprobs": tops, "finish_reason": {"type": finish}}

    with completions(engine, spoil=spoil) as held, pytest.raises(UserError) as caught:
        fleet(tmp_path, held, protocol="sglang").generate([[5, 6, 7]], SETTINGS)
    assert sentence in str(caught.value)


def test_a_stop_id_in_the_caps_last_place_is_a_stop(engine: Engine, prompts: list[list[int]],
                                                    tmp_path: Path) -> None:
    rows = zip(prompts, engine.generate(prompts, SETTINGS), strict=True)
    prompt, row = next((one, row) for one, row in rows if row.ended == "stop" and len(row.tokens) > 1)
    exactly = Generation(len(row.tokens), (STOP,), TOP_K)
    with completions(engine, spoil=edit(*FIRST, "finish_reason", to="length")) as held:
        (found,) = fleet(tmp_path, held).generate([prompt], exactly)
    assert (found.tokens, found.ended) == (row.tokens, "stop")


@pytest.mark.parametrize("order", ["429:0", "503", "500", "520", "cut"])
def test_a_server_that_is_busy_or_lost_for_a_moment_is_asked_again(engine: Engine, prompts: list[list[int]],
                                                                   tmp_path: Path, order: str) -> None:
    with completions(engine, orders=[order, order]) as held:
        found = fleet(tmp_path, held, in_flight=1).generate(prompts[:3], SETTINGS)
    assert [row.tokens for row in found] == [row.tokens for row in engine.generate(prompts[:3], SETTINGS)]
    assert len(held.asked) == 5
    events = [json.loads(line) for line in (tmp_path / "teacher.log").read_text().splitlines()]
    seen = [(event["failures"], event["refusals"]) for event in events if event["event"] == "server failed"]
    assert seen == ([(0, 1), (0, 2)] if order == "429:0" else [(1, 0), (2, 0)])


def test_retry_after_is_waited_for(engine: Engine, tmp_path: Path) -> None:
    with completions(engine, orders=["429:1"]) as held:
        fleet(tmp_path, held).generate([[5, 6, 7]], SETTINGS)
    (first, *_), (second, *_) = held.asked
    assert second - first >= 1


def test_a_late_answer_is_given_up_and_asked_for_again(engine: Engine, tmp_path: Path) -> None:
    with completions(engine, orders=["hold"]) as held:
        (row,) = fleet(tmp_path, held, timeout_s=4).generate([[5, 6, 7]], SETTINGS)
        assert row.tokens
        assert len(held.asked) == 2
    assert "has not answered within 4 s" in (tmp_path / "teacher.log").read_text()


def test_half_an_answer_is_refused(engine: Engine, tmp_path: Path) -> None:
    with completions(engine, orders=["malformed"]) as held, pytest.raises(UserError, match="Invalid JSON"):
        fleet(tmp_path, held).generate([[5, 6, 7]], SETTINGS)


@pytest.mark.parametrize(("order", "sentence"), [
    ("500", "answers 500; a prompt of 3 tokens was asked for 6 times"),
    ("400", "refuses /v1/completions (400): {\"error\": \"as ordered\"}"),
    ("307", "refuses /v1/completions (307)"),
])
def test_patience_has_an_end(engine: Engine, tmp_path: Path, order: str, sentence: str) -> None:
    with completions(engine, orders=[order] * 9) as held, pytest.raises(UserError) as caught:
        fleet(tmp_path, held).generate([[5, 6, 7]], SETTINGS)
    assert sentence in str(caught.value)
    assert len(held.asked) == (1 if order in ("400", "307") else 6)


@pytest.mark.parametrize("order", ["429", "429:0", "429:0.01"])
def test_a_server_is_not_given_up_for_saying_that_it_is_asked_too_much(
        engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setattr(openai, "LONGEST_WAIT_S", 0.02)
    with completions(engine, orders=[order] * 2 * openai.ATTEMPTS) as held:
        writer = fleet(tmp_path, held)
        (row,) = writer.generate([[5, 6, 7]], SETTINGS)
        assert row.tokens == engine.generate([[5, 6, 7]], SETTINGS)[0].tokens
        assert len(held.asked) == 2 * openai.ATTEMPTS + 1
        assert (writer.servers[0].failures, writer.servers[0].refusals) == (0, 0)


def test_where_all_that_is_heard_is_too_much_the_run_ends(
        engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "PATIENCE_S", 4.0)
    monkeypatch.setattr(openai, "LONGEST_WAIT_S", 0.2)
    with completions(engine, orders=["", *["429"] * 99]) as held:
        writer = fleet(tmp_path, held)
        writer.generate([[5, 6, 7]], SETTINGS)
        with pytest.raises(UserError, match="answers 429, and no server has answered a prompt for") as caught:
            writer.generate([[5, 6, 7]], SETTINGS)
    assert 3 <= len(held.asked) < 99
    assert "run the same command again later" in str(caught.value)


def test_the_others_do_a_dead_servers_part(engine: Engine, prompts: list[list[int]], tmp_path: Path) -> None:
    with completions(engine) as dead:
        pass
    with completions(engine) as held:
        writer = fleet(tmp_path, dead.address, held, in_flight=4)
        found = writer.generate(prompts, SETTINGS)
    assert [row.tokens for row in found] == [row.tokens for row in engine.generate(prompts, SETTINGS)]
    assert [one["address"] for one in writer.origin()] == [held.address]
    with pytest.raises(UserError, match="no server is left") as caught:
        writer.generate(prompts[:5], SETTINGS)
    assert f"{dead.address} cannot be reached" in str(caught.value)


def test_as_many_prompts_as_declared_are_under_way_and_no_more(engine: Engine, prompts: list[list[int]],
                                                               tmp_path: Path) -> None:
    with completions(engine, held=5) as held:  # none is answered before five have come
        fleet(tmp_path, held, in_flight=5).generate(prompts, SETTINGS)
    assert held.most_at_once == 5


def test_a_server_of_another_model_is_refused_before_it_is_asked(engine: Engine, tmp_path: Path) -> None:
    with completions(engine, model="other/Model") as held, pytest.raises(UserError) as caught:
        fleet(tmp_path, held).generate([[5, 6, 7]], SETTINGS)
    assert "serves other/Model, and not toy/Random-Llama; start it with --served-" in str(caught.value)
    assert not held.asked


def test_a_key_opens_and_its_lack_is_told(engine: Engine, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    with completions(engine, key=KEY) as held:
        with pytest.raises(UserError, match=r"refuses access \(401\): set TEACHER_API_KEY"):
            fleet(tmp_path, held).generate([[5, 6, 7]], SETTINGS)
        monkeypatch.setenv("TEACHER_API_KEY", KEY)
        assert fleet(tmp_path, held).generate([[5, 6, 7]], SETTINGS)
    assert held.keys == {None, f"Bearer {KEY}"}


def answering(writer: openai.Fleet, answer: Callable[[], httpx.Response]) -> openai.Fleet:
    """The same writer, every prompt of which is answered so."""
    def respond(request: httpx.Request) -> httpx.Response:
        models = httpx.Response(200, json={"data": [{"id": MODEL}]})
        return models if request.url.path == "/v1/models" else answer()

    writer.client = httpx.AsyncClient(transport=httpx.MockTransport(respond))
    return writer


def test_a_key_with_a_line_end_or_cut_in_two_is_hidden_as_well(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", f"{KEY}\n")

    def echo() -> httpx.Response:
        return httpx.Response(400, text="x" * 270 + f" Bearer {KEY}")

    with pytest.raises(UserError) as caught:
        answering(fleet(tmp_path, "http://localhost:9"), echo).generate([[5, 6, 7]], SETTINGS)
    assert "refuses /v1/completions (400): xxx" in str(caught.value)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-ключ", "sk-a\nb"])
def test_a_key_that_no_header_takes_is_told_and_not_shown(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", key)
    with pytest.raises(UserError, match="TEACHER_API_KEY holds a character") as caught:
        fleet(tmp_path, "http://localhost:9")
    assert "sk-" not in str(caught.value)


def test_a_body_that_cannot_be_unpacked_is_a_servers_fault(tmp_path: Path) -> None:
    class Packed(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"not packed"

    def broken() -> httpx.Response:
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=Packed())

    with pytest.raises(UserError, match="broke off the connection"):
        answering(fleet(tmp_path, "http://localhost:9"), broken).generate([[5, 6, 7]], SETTINGS)


def through_servers(mill: Mill, *servers: Completions) -> Mill:
    """The same repository, its teacher asking servers."""
    addresses = json.dumps([held.address for held in servers])
    mill.replace("profiles/toy.toml", "stop_on_repeat = 4\n", 'stop_on_repeat = 4\nengine = "openai"\n')
    mill.replace("profiles/toy.toml", "[start]\n", f"[servers]\naddresses = {addresses}\n[start]\n")
    return mill


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.fixture(scope="module")
def target(whole: Mill) -> Engine:
    return Engine(load_target(whole.root / "vendor" / "toy", "gguf", "float32", "cpu"), 1560)


def assert_same_text(ours: Mill, theirs: Mill) -> None:
    names = sorted(theirs.files("teacher"))
    assert sorted(ours.files("teacher")) == names
    for name in names:
        one, other = (mill.folder("teacher") / name for mill in (ours, theirs))
        if name.endswith(".jsonl"):
            assert one.read_bytes() == other.read_bytes()
            continue
        found, expected = load_file(one), load_file(other)
        for key, tensor in expected.items():
            if key == "topk_logprobs":
                torch.testing.assert_close(found[key], tensor, atol=2e-3, rtol=2e-3)
            else:
                assert torch.equal(found[key], tensor), f"{name}: {key}"


def test_the_stage_through_servers_gives_the_engines_text_and_says_whose_it_is(
        whole: Mill, target: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    with completions(target, key=KEY) as one, completions(target, key=KEY) as other:
        mill = through_servers(whole.copy(tmp_path / "mill"), one, other)
        said = mill.run("teacher")
        assert one.prompts
        assert other.prompts
        mill.replace("profiles/toy.toml", f'"{one.address}", ', "")
        assert "runs, because" not in mill.run("teacher"), "another address is no other text"
    assert_same_text(mill, whole)
    facts = [{"address": held.address, "model": MODEL, "protocol": "vllm", "version": "0.28.0"}
             for held in (one, other)]
    metrics = mill.metrics("teacher")
    assert metrics.pop("rederivable") is False
    assert metrics.pop("servers") == sorted(facts, key=lambda fact: fact["address"])
    assert metrics.keys() == whole.metrics("teacher").keys()
    assert run_of(mill.record("teacher"))["reached"] == [one.address, other.address]
    assert "reached" not in run_of(whole.record("teacher"))
    assert key_of(mill.record("teacher")) != key_of(whole.record("teacher"))
    with safe_open(mill.folder("teacher") / "train-00000.safetensors", framework="pt") as shard:
        assert all(fact in facts for fact in json.loads(shard.metadata()["origin"]))
    written = [path.read_bytes() for path in (mill.root / "logs").rglob("*") if path.is_file()]
    written += mill.files("teacher").values()
    assert not any(KEY.encode() in content for content in [*written, said.encode()])


def test_the_record_names_a_server_that_wrote_for_choosing_alone(
        whole: Mill, target: Engine, tmp_path: Path) -> None:
    with completions(target, orders=["", ""] + ["503"] * 999) as one, completions(target) as other:
        mill = through_servers(whole.copy(tmp_path / "mill"), one, other)
        mill.run("teacher")
    for path in mill.folder("teacher").glob("train-*.safetensors"):
        assert [fact["address"] for fact in read_origin(path)] == [other.address]
    named = [fact["address"] for fact in mill.metrics("teacher")["servers"]]
    assert sorted(named) == sorted([one.address, other.address])
    assert sorted(mill.files("teacher")) == sorted(whole.files("teacher"))


def test_a_server_that_echoes_the_key_does_not_bring_it_into_a_log(
        whole: Mill, target: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    with completions(target, spoil=edit("model", to=f"for {KEY}")) as held:
        mill = through_servers(whole.copy(tmp_path / "mill"), held)
        said = mill.run("teacher", code=2)
    assert "answers as 'for [TEACHER_API_KEY]', where" in said
    assert KEY not in said + (mill.root / "logs" / "toy" / "teacher.log").read_text()


def test_a_killed_run_asks_for_no_finished_shard_again(whole: Mill, target: Engine, tmp_path: Path) -> None:
    sizes = [len((whole.folder("data") / f"{name}.jsonl").read_text().splitlines())
             for name in ("dev", "examples", "heldout")]
    with completions(target, orders=[""] * (sum(sizes) + 20) + ["hold"] * 99) as held:
        mill = through_servers(whole.copy(tmp_path / "mill"), held)
        mill.forget("teacher")
        mill.kill("teacher", lambda: len(held.asked) >= sum(sizes) + 21, 0, "worker")
        assert len(mill.work("teacher", "train-*.safetensors")) == 2
        held.orders.clear()
        held.released.set()
        held.prompts.clear()
        mill.run("teacher")
    rows = map(json.loads, (mill.folder("data") / "train.jsonl").read_text().splitlines())
    ordered = sorted(rows, key=lambda row: (len(row["prompt"]), row["id"]))
    assert sorted(held.prompts) == sorted(row["prompt"] for row in ordered[16:])
    assert_same_text(mill, whole)


def test_a_stage_with_servers_reaches_them_alone_and_only_it_gets_their_key(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path / "house")
    look = ('    import os, socket\n    seen = sorted(set(os.environ) & {"TEACHER_API_KEY", "HF_TOKEN"})\n'
            '    (job.out / "seen.txt").write_text(" ".join(seen))\n')
    for stage in ("data", "distill"):
        workshop.replace(f"stages/{stage}.py", "    count(job)\n", f"    count(job)\n{look}")
    with completions(None) as one, completions(None) as other:  # type: ignore[arg-type]
        port = one.address.rpartition(":")[2]
        workshop.write("profiles/toy.toml", f'extends = "smollm2"\n[teacher]\nengine = "openai"\n[servers]\n'
                                            f'addresses = ["http://localhost:{port}"]\n')
        workshop.replace("stages/distill.py", 'SECTIONS =', 'REACHES = "servers"\nSECTIONS =')
        connect = "    socket.create_connection(('{}', {}), 5).close()\n"
        workshop.replace("stages/distill.py", look, look + connect.format("localhost", port))
        environment = {"TEACHER_API_KEY": KEY, "HF_TOKEN": "hf_CANARYcanaryCANARY000"}
        workshop.run("distill", "--with-upstream", **environment)
        seen = {stage: (workshop.root / "build/toy" / stage / "seen.txt").read_text()
                for stage in ("data", "distill")}
        assert seen == {"data": "", "distill": "TEACHER_API_KEY"}
        assert run_of(workshop.record("distill"))["reached"] == [f"http://localhost:{port}"]
        assert workshop.run(module="plan").count(f"  reaches   http://localhost:{port}") == 1
        undeclared = other.address.rpartition(":")[2]
        workshop.replace("stages/distill.py", connect.format("localhost", port),
                         connect.format("127.0.0.1", undeclared))
        said = workshop.run("distill", code=2, **environment)
    assert (f"distill: tried to reach 127.0.0.1:{undeclared}; this stage may reach http://localhost:{port}"
            in said)
