"""The report: what the records and the last selfcheck say, and what does not belong together."""

import json
import shutil

import pytest

from drafter.engine import Generated
from drafter.replay import Conversation, paired, simulate, summary
from stages.files import digest_of, sha256_file
from stages.rehearsal.gates import Gate
from stages.report import ROOT, main
from stages.training.tally import report as tally_report
from stages.training.tally import tally
from stages.wrapper.declaration import read_declarations
from stages.wrapper.record import make_record, write_record


def taus(agreement):
    talks = [Conversation("a", "math", (1,), tuple(range(40))), Conversation("b", "stem", (1,), (5, 6, 7))]
    steps = [simulate(agreement), simulate([False] * 3)]
    return summary(talks, steps), steps


def selfcheck_report(output):
    tau, steps = taus([True, True, False, True] * 10)
    low, low_steps = taus([False] * 40)
    beaten = low.to_json() | {"difference": paired(steps, low_steps).to_json()}
    gates = [
        Gate("size", True, 4, 48_000_000, 47_999_996, "1 file"),
        Gate("smoke", False, 0, 1, -1, "HTTP 500: [red] lies"),
        Gate("stop", None, None, None, None, "not reached"),
    ]
    files = {path.name: sha256_file(path) for path in output.iterdir()}
    return {
        "passed": False, "files_sha256": digest_of(files),
        "gates": [gate.to_json() for gate in gates],
        "environment": {"network": "none", "user": "user 65534"},
        "tau": {"dev": tau.to_json(), "examples": tau.to_json()},
        "baselines": {name: {"trigram": beaten, "prompt lookup": beaten} for name in ("dev", "examples")},
    }


@pytest.fixture
def built(tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "lock").mkdir()
    shutil.copy(ROOT / "lock" / "sources.toml", tmp_path / "lock")
    (tmp_path / "stages").mkdir()
    for stage in read_declarations(ROOT):
        shutil.copy(ROOT / "stages" / f"{stage}.py", tmp_path / "stages")
    output = tmp_path / "output"
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"1234")
    loop, plain = Generated([1, 2, 3] * 10, ended="stop"), Generated(list(range(1_200)))
    fidelity = {"conversations": 96, "whole": 81, "whole_share": 0.8438, "prefix_share": 0.913}
    runs = [{"ranks": 4, "tokens": 1_000, "seconds": 2.0, "tokens_per_second": 500},
            {"ranks": 1, "tokens": 230, "seconds": 1.0, "tokens_per_second": 230}]
    written = tally_report(tally(["math", "stem"], [loop, plain])) | {
        "fidelity": {"dev": fidelity}, "runs": runs}
    for stage, seconds, metrics in (("data", 3.25, {}), ("teacher", 0.25, written),
                                    ("distill", 1200.5, {"tau_dev_before": 1.0131})):
        definition = {"stage": stage, "config": {}, "seed": 0, "device": "cpu", "code": {}, "inputs": {},
                      "files": {}}
        run = {"profile": "smollm2", "runner": "host", "locked": stage == "data", "seconds": seconds,
               "started": "2026-01-01T00:00:00Z", "finished": "2026-01-01T00:10:00Z", "log": "x.log",
               "metrics": metrics}
        write_record(tmp_path, "smollm2", make_record(definition, {}, run))
    path = tmp_path / "logs" / "smollm2" / "selfcheck-report.json"
    path.write_text(json.dumps(selfcheck_report(output)))
    return tmp_path


def test_shows_tau_bytes_gates_and_times(built, capsys):
    assert main(["--profile", "smollm2"], root=built) == 0
    text = capsys.readouterr().out
    for expected in (
        "1,204.0", "host, unlocked", "48,000,000", "FAILED", "HTTP 500: [red] lies", "user 65534",
        "prompt lookup", "untrained, simulated", "1.013", "math", "steps that reached it",
    ):
        assert expected in text, expected
    tau, _ = taus([True, True, False, True] * 10)
    assert f"{tau.tau:.3f}" in text
    assert f"{tau.low:.3f} to {tau.high:.3f}" in text
    assert "has changed since" not in text


def test_shows_what_the_teacher_wrote_and_how_true_it_is(built, capsys):
    assert main(["--profile", "smollm2"], root=built) == 0
    text = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in text.splitlines()
            if len(cells := [cell.strip() for cell in line.strip("│┃ ").split("│")]) == 7}
    assert rows["math"] == ["1", "30", "100.0%", "100.0%", "0.000", "9-32: 1"]
    assert rows["stem"] == ["1", "1,200", "0.0%", "0.0%", "0.000", "513-: 1"]
    assert rows["all"] == ["2", "1,230", "50.0%", "50.0%", "0.000", "9-32: 1, 513-: 1"]
    said = " ".join(text.split())
    assert "fidelity on dev: 91.3% of a given continuation's tokens" in said
    assert "81 reproduced whole" in said
    assert "the teacher's run 1 of 2: 1,000 tokens in 2.0 s, 500 a second, by 4 ranks" in said
    assert "the teacher's run 2 of 2: 230 tokens in 1.0 s, 230 a second, by 1 rank" in said


def test_json_holds_the_same(built, capsys):
    assert main(["--profile", "smollm2", "--json"], root=built) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stages"]["distill"]["seconds"] == 1200.5
    assert report["untouched"] == 1.0131
    assert report["selfcheck"]["gates"][1]["passed"] is False
    assert "without a record: " in report["notes"][0]


def test_a_report_of_other_files_is_called_one(built, capsys):
    (built / "output" / "model.safetensors").write_bytes(b"1235")
    assert main(["--profile", "smollm2"], root=built) == 0
    assert "has changed since this selfcheck" in capsys.readouterr().out
    (built / "logs" / "smollm2" / "selfcheck-report.json").unlink()
    assert main(["--profile", "smollm2"], root=built) == 0
    assert "no selfcheck yet" in capsys.readouterr().out


def test_nothing_built_is_a_sentence(built, capsys):
    shutil.rmtree(built / "logs")
    assert main(["--profile", "smollm2"], root=built) == 2
    assert "Run make all PROFILE=smollm2" in capsys.readouterr().err
    assert main(["--profile", "none"], root=built) == 2
