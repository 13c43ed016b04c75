"""The rehearsal of tiny submissions, whole and broken: each fault meets its gate and its sentence."""

import ast
import hashlib
import itertools
import json
import os
import subprocess
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from engines import podman_or_skip
from safetensors.numpy import save_file

from drafter.replay import Conversation, replay_offline, summary
from stages import selfcheck
from stages.errors import UserError
from stages.job import Job
from stages.profile import Limits, Selfcheck
from stages.rehearsal.client import Terms, replay_http
from stages.rehearsal.gates import REHEARSED, static_gates
from stages.rehearsal.isolation import command
from stages.rehearsal.projection import openings, windows
from stages.rehearsal.review import review
from stages.rehearsal.server import HANDED_ON
from stages.size import survey

# Counts upwards: right until the continuation jumps. FAULT tells it what to do wrong.
SERVER = r"""
import itertools, json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
FAULT = "%s"
count = itertools.count(1)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet an answer
    def log_message(self, *_):
        pass
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200, b"{}")
    def do_POST(self):
        asked = next(count)
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["tokens"]
        draft = [tokens[-1] + step for step in range(1, 17)]
        body = json.dumps({"draft": draft}).encode()
        status = 200
        if FAULT == "late" and asked %% 4 == 0:
            time.sleep(30)
        if FAULT == "garbage" and asked > 3:
            body = b"<html>"
        if FAULT == "dies" and asked > 3:
            print("the last words", flush=True)
            os._exit(3)
        if FAULT == "one in ten" and asked %% 10 == 0:
            status = 500
        if FAULT == "one in thirty" and asked %% 30 == 5:
            status = 500
        if FAULT == "empty" and asked == 4:
            body = b'{"draft": []}'
        if FAULT == "resets" and asked %% 3 == 0:
            self.close_connection = True
            return
        if FAULT == "too long":
            body = json.dumps({"draft": [*draft, 1]}).encode()
        if FAULT == "floats":
            body = b'{"draft": [1.0]}'
        self.answer(status, body)

class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

if FAULT == "never ready":
    time.sleep(30)
if FAULT == "writes":
    (open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "cache.bin"), "w")).close()
if __name__ == "__main__":
    # The first process of a container has no default for this signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("serving as", os.environ["MODEL_NAME"], sorted(os.environ), flush=True)
    Server((os.environ["HOST"], int(os.environ["PORT"])), Handler).serve_forever()
"""
SERVE = 'exec python "$(dirname "$0")/drafter/server.py"\n'
LIMITS = Limits(limit_bytes=100_000, reserve_bytes=50_000)
RULES = Selfcheck(in_flight=8, request_timeout_s=5.0, start_timeout_s=20.0, heldout_tokens=44314)


def write_sums(folder):
    names = [file.name for file in survey(folder).files]
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names
             if name != "SHA256SUMS" and not name.startswith("evidence/")]
    (folder / "SHA256SUMS").write_text("".join(lines))


def submission(folder, fault="", serve=SERVE):
    declaration = {
        "base_model": "none", "base_revision": "from-scratch",
        "training_evidence_files": ["evidence/train.log"], "inference_evidence_files": ["serve.sh"],
    }
    (folder / "drafter").mkdir(parents=True)
    (folder / "evidence").mkdir()
    (folder / "architecture.json").write_text(json.dumps(declaration))
    (folder / "serve.sh").write_text(serve)
    (folder / "drafter" / "server.py").write_text(SERVER % fault)
    (folder / "evidence" / "train.log").write_text("nothing was trained")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    write_sums(folder)
    return folder


def conversations(count, seed=0, length=24):
    """Continuations that count upwards and jump once in a while."""
    generator = np.random.default_rng(seed)
    shape = count, length
    jumps = np.where(generator.random(shape) < 0.25, generator.integers(2, 50, shape), 1)
    starts = 1000 + 10 * np.arange(count)
    return [
        Conversation(f"{seed}-{n}", ("math", "stem")[n % 2], (5, int(starts[n])),
                     tuple((starts[n] + np.cumsum(jumps[n])).tolist()))
        for n in range(count)
    ]


def counting(context):
    return [context[-1] + step for step in range(1, 17)]


def write_set(path, talks):
    rows = [{"id": t.id, "category": t.category, "prompt": list(t.prompt),
             "continuation": list(t.continuation)} for t in talks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(params=["host", "podman"])
def runner(request):
    """Where the rehearsal is held: on this machine, and in the grader's twin."""
    return request.param if request.param == "host" else podman_or_skip()


@pytest.fixture
def bench(tmp_path, runner):
    """Return a function that checks a submission: (report, the sentence it was refused with or None)."""
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "serve.txt").write_text("")
    (tmp_path / "lock" / "build.txt").write_text("")
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    ids = np.array([1, 2, 3, 1, 2, 4], dtype=np.int32)
    shard = {"continuation_ids": ids, "continuation_offsets": np.array([0, 3, 6])}
    save_file(shard, teacher / "train-00000.safetensors")
    write_set(teacher / "examples.jsonl", conversations(8))
    write_set(teacher / "dev.jsonl", conversations(6, seed=1))

    def check(folder, limits=LIMITS, **rules):
        out = tmp_path / "out"
        out.mkdir()
        config = SimpleNamespace(limits=limits, selfcheck=RULES.model_copy(update=rules))
        job = Job(stage="selfcheck", config=config, inputs={"pack": folder, "teacher": teacher}, out=out,
                  work=tmp_path, root=tmp_path, seed=0, device="cpu",
                  log=tmp_path / "logs" / "p" / "selfcheck.log", runner=runner)
        refused = None
        try:
            selfcheck.run(job)
        except UserError as error:
            refused = str(error)
        report = json.loads((out / "report.json").read_text())
        assert report == json.loads((tmp_path / "logs" / "p" / "selfcheck-report.json").read_text())
        assert report["passed"] == (refused is None)
        return report, refused

    return check


def gate(report, name):
    return next(row for row in report["gates"] if row["name"] == name)


def failed(report):
    return [row["name"] for row in report["gates"] if row["passed"] is False]


def test_a_whole_submission_passes_and_its_tau_is_the_offline_one(tmp_path, bench, runner):
    folder = submission(tmp_path / "output")
    (folder / "drafter" / "again.py").symlink_to("server.py")
    write_sums(folder)
    report, refused = bench(folder)
    assert (refused, failed(report), report["stage_reached"]) == (None, [], "stop")
    assert [row["passed"] for row in report["gates"]] == [True] * (4 + len(REHEARSED))
    for name, talks in {"examples": conversations(8), "dev": conversations(6, seed=1)}.items():
        offline = summary(talks, [replay_offline(talk, counting) for talk in talks])
        assert report["tau"][name] == json.loads(json.dumps(offline.to_json()))
        for beaten in report["baselines"][name].values():
            assert beaten["difference"]["low"] > 0
            assert beaten["difference"]["difference"] == pytest.approx(offline.tau - beaten["tau"])
    scaled = report["replays"]["examples"]["serving_seconds"] * 44314 / report["tau"]["examples"]["tokens"]
    assert gate(report, "serving time")["value"] == pytest.approx(scaled)
    assert gate(report, "size")["margin"] == LIMITS.limit_bytes - sum(report["bytes"].values())
    # A clean environment: nothing of ours is handed on.
    (line,) = report["server_log"]
    assert line.startswith("serving as submission")
    handed = {"HOME", "HOST", "LANG", "MODEL_NAME", "PATH", "PORT"}
    of_engine = {"container", "HOSTNAME", "TERM", "LD_LIBRARY_PATH", "TMPDIR"}
    found = set(ast.literal_eval(line.partition("submission ")[2]))
    assert found - {"PWD", "SHLVL", "_", *HANDED_ON, *of_engine} == handed
    assert report["environment"]["twin"].startswith("none" if runner == "host" else "podman, localhost/")
    assert report["device"]


@pytest.mark.parametrize("runner", ["host"])
def test_the_time_of_long_examples_is_projected_from_windows_and_held_to_the_whole(tmp_path, bench):
    folder = submission(tmp_path / "output")
    write_set(tmp_path / "teacher" / "examples.jsonl", conversations(8, length=200))
    report, refused = bench(folder)
    assert refused is None
    replays, time_gate = report["replays"], gate(report, "serving time")
    assert (replays["windows"]["tokens"], replays["examples"]["tokens"]) == (8 * 76, 8 * 200)
    seconds = {name: replay["serving_seconds"] * 44314 / replay["tokens"] for name, replay in replays.items()}
    assert time_gate["value"] == pytest.approx(seconds["windows"])
    assert f"so this is {seconds['windows'] / seconds['examples'] - 1:+.0%} off" in time_gate["text"]


@pytest.mark.parametrize("runner", ["host"])
def test_the_network_is_taken_away_where_the_system_lets_it(tmp_path, bench):
    probe = command("--no-network", command=["bash", "-c", "echo $DRAFTMILL_NETWORK"])
    possible = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    reach = 'exec 2>&1; cat /proc/net/dev | tail -n +3 | cut -d: -f1; id -u; grep CapEff /proc/self/status\n'
    report, _ = bench(submission(tmp_path / "output", serve=reach + SERVE))
    assert report["environment"]["network"] == possible
    *devices, _, capabilities, _ = report["server_log"]
    if possible == "none":
        assert [name.strip() for name in devices] == ["lo"]
    assert int(capabilities.split()[1], 16) == 0


@pytest.mark.parametrize(
    ("fault", "rules", "gates", "sentence"),
    [
        ("never ready", {"start_timeout_s": 0.8}, ["start"], "/health did not answer 200 within 0.8 s"),
        ("late", {"request_timeout_s": 3, "budget_s": 1e6}, ["failed requests"], "no answer within 3 s"),
        ("garbage", {}, ["failed requests"], "answer: not JSON: '<html>'"),
        ("dies", {}, ["failed requests", "health after", "stop"], "had ended with code 3"),
        ("one in ten", {}, ["failed requests"], "status: HTTP 500"),
        ("empty", {}, ["empty drafts"], "1 empty drafts in"),
        ("writes", {}, ["unchanged"], "drafter/cache.bin was added"),
        ("", {"budget_s": 0.01, "heldout_tokens": 10**9}, ["serving time"], "scaled to 1,000,000,000"),
    ],
)
def test_a_fault_while_serving(tmp_path, bench, runner, fault, rules, gates, sentence, monkeypatch):
    if "start" in gates:  # then its end is not judged
        monkeypatch.setattr(selfcheck, "STOP_TIMEOUT_S", 3.0)
    report, refused = bench(submission(tmp_path / "output", fault), **rules)
    assert failed(report) == gates
    assert sentence in refused
    assert runner == "host" or report["environment"]["network"] == "none"
    if fault == "dies":
        assert report["server_log"][-1] == "the last words"


@pytest.mark.parametrize(
    ("serve", "gate_name", "sentence"),
    [
        ("echo no weights; exit 7\n", "start", "serve.sh ended with code 7 after"),
        (f"trap '' TERM\n{SERVE.removeprefix('exec ')}", "stop", "still running"),
    ],
)
def test_a_fault_of_serve_sh(tmp_path, bench, serve, gate_name, sentence, monkeypatch):
    monkeypatch.setattr(selfcheck, "STOP_TIMEOUT_S", 1.0)
    report, refused = bench(submission(tmp_path / "output", serve=serve))
    assert failed(report) == [gate_name]
    assert sentence in refused


@pytest.mark.parametrize("runner", ["host"])
def test_a_server_that_outlives_serve_sh(tmp_path, bench):
    """In a container nothing can."""
    report, refused = bench(submission(tmp_path / "output", serve=SERVE.removeprefix("exec ") + "echo\n"))
    assert failed(report) == ["stop"]
    assert "1 of its processes were left running" in refused


def remove(name):
    return lambda folder: (folder / name).unlink()


def declare(**changes):
    def change(folder):
        path = folder / "architecture.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        write_sums(folder)

    return change


def link(name, target):
    return lambda folder: (folder / name).symlink_to(target)


def damage(folder):
    (folder / "model.safetensors").write_bytes(bytes(999) + b"1")


@pytest.mark.parametrize(
    ("change", "gate_name", "sentence"),
    [
        (remove("architecture.json"), "review", "architecture.json is missing at the top"),
        (remove("serve.sh"), "review", "serve.sh is missing at the top"),
        (declare(base_model=None), "review", "base_model must be a text"),
        (declare(base_revision="main"), "review", "base_revision 'main' is neither"),
        (declare(training_evidence_files=[]), "review", "training_evidence_files must be a list"),
        (declare(training_evidence_files=["../train.log"]), "review", "../train.log, which is outside"),
        (declare(training_evidence_files=["/etc/hostname"]), "review", "/etc/hostname, which is outside"),
        (declare(inference_evidence_files=["gone.py"]), "review", "gone.py, which is not there"),
        (damage, "review", "model.safetensors does not have the sha256"),
        (lambda folder: (folder / "more.txt").write_text("x"), "review", "more.txt is not listed"),
        (link("a", "/etc/hostname"), "files", "a is a link to an absolute path"),
        (link("a", "../x"), "files", "leads out of the submission"),
        (link("a", "gone"), "files", "a file that is not there"),
        (link("a", "a"), "files", "leads back to itself"),
        (link("a", "drafter"), "files", "a link to a folder"),
    ],
)
def test_a_fault_that_can_be_seen_before_the_start(tmp_path, change, gate_name, sentence):
    folder = submission(tmp_path / "output")
    change(folder)
    gates = {row.name: row for row in static_gates(survey(folder), LIMITS, {})}
    assert gates.pop(gate_name).text.find(sentence) >= 0
    assert all(row.passed for row in gates.values())


@pytest.mark.parametrize("runner", ["host"])
def test_one_byte_over_the_limit_is_never_started(tmp_path, bench):
    folder = submission(tmp_path / "output")
    total = survey(folder).total_bytes
    exact = Limits(limit_bytes=total, reserve_bytes=total - 1)
    assert all(row.passed for row in static_gates(survey(folder), exact, {}))
    over = Limits(limit_bytes=total - 1, reserve_bytes=1)
    report, refused = bench(folder, limits=over)
    assert failed(report) == ["size"]
    assert f"{total:,} bytes are 1 over the limit of {total - 1:,}" in refused
    assert [row["name"] for row in report["gates"] if row["passed"] is None] == list(REHEARSED)
    assert report["stage_reached"] == "files"
    assert report["tau"] == {}


def test_windows_are_those_of_the_contest():
    talks = [Conversation(str(n), "math", (1, n), tuple(range(256))) for n in range(40)]
    found = windows(talks)
    assert sum(len(talk.continuation) for talk in found) == 2432
    starts = [len(talk.prompt) - 2 for talk in found]
    assert (starts[0], starts[-1]) == (0, 256 - 76)
    assert {after - before for before, after in itertools.pairwise(starts)} <= {5, 6}
    for talk, start in zip(found, starts, strict=True):
        whole = talks[int(talk.id)]
        assert talk.prompt == whole.prompt + whole.continuation[:start]
        assert talk.continuation == whole.continuation[start : start + 76]
    assert len({talk.id for talk in found}) == 32
    assert {found[0].id, found[-1].id} == {"0", "39"}
    assert [talk.continuation for talk in openings(talks[:2])] == [tuple(range(76))] * 2


def test_windows_of_few_short_conversations_are_these():
    talks = [*conversations(3), Conversation("none", "math", (1,), ())]
    assert windows(talks) == talks[:3]
    assert windows([]) == []


@contextmanager
def serving(fault):
    """Serve one faulty answer after another from a thread, and yield the address."""
    scope = {"__name__": "fault", "__file__": "/nowhere"}
    exec(SERVER % fault, scope)
    server = scope["Server"](("127.0.0.1", 0), scope["Handler"])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("in_flight", [1, 32])
def test_over_http_the_steps_are_those_of_the_loop(in_flight):
    talks = [*conversations(9), Conversation("none", "math", (1,), ())]
    seen = []
    with serving("") as url:
        replayed = replay_http(talks, url, Terms(in_flight=in_flight), seen.append)
    assert replayed.steps == [replay_offline(talk, counting) for talk in talks]
    assert replayed.requests == sum(steps.count for steps in replayed.steps) == len(replayed.latencies_s)
    assert sum(seen) == 9 * 24
    assert (replayed.failures, replayed.empties, replayed.lost_steps) == ({}, 0, 0)


def test_a_failure_that_is_not_late_is_tried_again():
    talks = conversations(9)
    with serving("one in thirty") as url:
        replayed = replay_http(talks, url, Terms(in_flight=1))
    assert replayed.failures.keys() == {"status"}
    assert replayed.lost_steps == 0
    assert replayed.steps == [replay_offline(talk, counting) for talk in talks]
    assert 0 < replayed.failure_share < 0.05


def test_a_late_answer_is_not_tried_again_and_its_time_counts():
    talks = conversations(3)
    with serving("late") as url:
        replayed = replay_http(talks, url, Terms(in_flight=4, request_timeout_s=0.2))
    late = replayed.failures["late"]
    assert replayed.failures.total() == late == replayed.lost_steps > 0
    assert replayed.requests == sum(steps.count for steps in replayed.steps)
    assert replayed.request_seconds >= 0.2 * late


def test_dropped_connections_are_counted_apart():
    with serving("resets") as url:
        replayed = replay_http(conversations(3), url, Terms(in_flight=2))
    # Some are retried on a fresh connection and succeed, so the loop ends by itself.
    assert not replayed.gave_up
    assert replayed.failures.keys() == {"reset"}
    assert replayed.reasons[0].startswith("reset: ")


@pytest.mark.parametrize(
    ("fault", "reason"), [("too long", "17 ids in a draft"), ("floats", "not a token id: 1.0")]
)
def test_answers_outside_the_contract_fail(fault, reason):
    talks = conversations(1)
    with serving(fault) as url:
        replayed = replay_http(talks, url, Terms())
    assert replayed.failures["answer"] == replayed.requests == 3 * 24
    assert reason in replayed.reasons[0]
    assert replayed.steps[0].count == 24  # never anything accepted: one target token a step


def test_it_gives_up_on_a_server_that_is_gone_and_stops_at_the_budget():
    talks = conversations(20)
    gone = replay_http(talks, "http://127.0.0.1:9", Terms(in_flight=4))
    assert gone.gave_up
    assert 100 <= gone.requests < 104
    assert gone.failures["connection"] == gone.requests
    talks = conversations(12_000)  # many times what three seconds are enough for
    with serving("") as url:
        spent = replay_http(talks, url, Terms(in_flight=4, budget_s=3.0))
    assert spent.over_budget
    assert 0 < spent.requests < sum(steps.count for steps in spent.steps)
    assert sum(steps.tokens for steps in spent.steps) == 12_000 * 24


@pytest.mark.skipif(os.getuid() != 0, reason="only root has a user to give up")
def test_another_user_runs_the_server_where_that_user_can_read_python():
    look = "id -u; grep -E 'CapEff|NoNew' /proc/self/status"
    probe = command("--user", "65534", command=["bash", "-c", look])
    lines = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.split()
    assert lines == ["65534", "CapEff:", "0000000000000000", "NoNewPrivs:", "1"]


def test_a_refusal_of_the_system_is_a_code_of_its_own():
    probe = command("--no-capabilities", command=["/no/such/program"])
    ended = subprocess.run(probe, capture_output=True, text=True, check=False)
    assert (ended.returncode, "No such file" in ended.stderr) == (126, True)


@pytest.mark.parametrize(("status", "sha256", "told"), [
    ("ok", "a" * 64, True), ("found", "a" * 64, True), ("failed", "a" * 64, False), ("ok", "b" * 64, False)])
def test_every_file_that_was_fetched_has_its_download_in_the_log(tmp_path, status, sha256, told):
    evidence = submission(tmp_path / "output") / "evidence"
    for name in ("records", "logs"):
        (evidence / name).mkdir(parents=True)
    subject = {"name": "text/train.jsonl", "digest": {"sha256": "a" * 64}}
    (evidence / "records" / "fetch.json").write_text(json.dumps({"subject": [subject]}))
    row = {"uri": "hf:text/train.jsonl", "status": status, "sha256": sha256}
    rows = [row | {"sha256": [sha256]}, row | {"uri": {}}, row]
    text = "\n".join(["[]", '{"uri"', "[" * 100_000, *map(json.dumps, rows)])
    (evidence / "logs" / "downloads.jsonl").write_text(text + "\n")
    wrong = [one for one in review(survey(tmp_path / "output")) if "tells of no download" in one]
    assert len(wrong) == (not told)
    assert all("text/train.jsonl" in one for one in wrong)


def test_without_its_log_no_download_is_told_of_and_a_broken_record_is_none(tmp_path):
    records = submission(tmp_path / "output") / "evidence" / "records"
    records.mkdir(parents=True)
    subject = {"name": "text/train.jsonl", "digest": {"sha256": "a" * 64}}
    (records / "fetch.json").write_text(json.dumps({"subject": [subject]}))
    wrong = review(survey(tmp_path / "output"))
    assert any("tells of no download of text/train.jsonl" in one for one in wrong)
    for broken in ("{", "[]", '{"subject": [1]}'):
        (records / "fetch.json").write_text(broken)
        assert "evidence/records/fetch.json is not a record" in review(survey(tmp_path / "output"))
