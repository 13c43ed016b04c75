"""A real submission of the toy model, and one broken from it for each way to fail at the grader's.

Held in the grader's twin where podman has its image, else on this machine.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE, podman_or_skip, reason_against
from mill import Mill, finished

from stages import selfcheck
from stages.profile import load_profile
from stages.rehearsal import venv
from stages.selfcheck import Rehearsal, check, failures
from stages.size import survey

ROOT = Path(__file__).resolve().parent.parent
RUNNER = "host" if reason_against() else ENGINE
RULES = {"request_timeout_s": 20.0, "start_timeout_s": 300.0}
# What a fault does at the n-th request; appended to the real drafter/app.py.
FAULTY = '''
import itertools, os
_asked, _whole = itertools.count(1), Service.draft
async def _faulty(self, request):
    n = next(_asked)
    {fault}
    return await _whole(self, request)
Service.draft = _faulty
'''


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Mill:
    """The finished toy mill, packed again with the wheels that a server really needs."""
    mill = finished(tmp_path_factory).copy(tmp_path_factory.mktemp("real") / "mill")
    for name in ("serve.txt", "serve.in"):
        mill.write(f"lock/{name}", (ROOT / "lock" / name).read_text())
    shutil.rmtree(mill.root / "vendor" / "wheels")
    shutil.copytree(smollm2_folder.parent / "wheels", mill.root / "vendor" / "wheels")
    mill.run("pack", "--with-upstream")
    return mill


@pytest.fixture
def folder(mill: Mill, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mill.root / "output", tmp_path / "output"))


def rehearse(mill: Mill, folder: Path, limit_bytes: int | None = None, **rules: float) -> dict[str, Any]:
    """Check a submission on the openings of the toy examples."""
    profile = load_profile("toy", mill.root / "profiles")
    limits = profile.limits
    if limit_bytes is not None:
        limits = limits.model_copy(update={"limit_bytes": limit_bytes})
    scaled = profile.selfcheck.model_copy(update=RULES | rules)
    teacher = mill.root / "build" / "toy" / "teacher"
    return check(Rehearsal(folder, teacher, mill.root, limits, scaled, RUNNER, "cpu", quick=True))


def failed(report: dict[str, Any]) -> dict[str, str]:
    """The failed gates and what they say."""
    return {gate["name"]: gate["text"] for gate in report["gates"] if gate["passed"] is False}


def seal(folder: Path) -> None:
    """Sum up the payload again, so that only the fault itself can be found."""
    names = [file.name for file in survey(folder).files if not file.name.startswith("evidence/")]
    rows = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
            for name in names if name != "SHA256SUMS")
    (folder / "SHA256SUMS").write_text("".join(rows))


def add(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a") as stream:
        stream.write(text)
    seal(folder)


def begin(folder: Path, line: str) -> None:
    """Let serve.sh begin with a line."""
    path = folder / "serve.sh"
    text = path.read_text()
    assert text.count("\nset -u\n") == 1
    path.write_text(text.replace("\nset -u\n", f"\nset -u\n{line}\n"))
    seal(folder)


def test_the_whole_one_passes(mill: Mill, folder: Path):
    report = rehearse(mill, folder)
    assert failures(report) == []
    assert (report["passed"], report["quick"], report["stage_reached"]) == (True, True, "stop")
    assert list(report["replays"]) == ["examples"]
    assert report["replays"]["examples"]["empties"] == 0
    events = [json.loads(line)["event"] for line in report["server_log"] if line.startswith("{")]
    assert {"listening", "stopped"} <= set(events)
    found = survey(folder)
    sums = {file.name: hashlib.sha256(file.path.read_bytes()).hexdigest() for file in found.files}
    canonical = json.dumps(sums, sort_keys=True, separators=(",", ":")).encode()
    assert report["files_sha256"] == hashlib.sha256(canonical).hexdigest()
    if RUNNER == ENGINE:  # a twin that is not quite the grader's says so
        twin = report["environment"]["twin"]
        assert report["environment"]["network"] == "none"
        assert "mounted read-only" in twin
        assert re.search("Ubuntu 24.04[^,]*;|where the grader has Ubuntu 24.04", twin)


@pytest.mark.parametrize(("file", "text", "rules", "gate", "sentence"), [
    ("drafter/app.py", "\nimport time\ntime.sleep(600)\n",
     {"start_timeout_s": 4}, "start", "/health did not answer 200 within 4 s"),
    ("drafter/app.py", FAULTY.format(fault="if n % 4 == 0: await asyncio.sleep(30)"),
     {"request_timeout_s": 3, "budget_s": 1e6}, "failed requests", "late: no answer within 3 s"),
    ("drafter/app.py", FAULTY.format(fault="if n > 3: return raw('<html>')"),
     {}, "failed requests", "answer: not JSON: '<html>'"),
    ("drafter/app.py", FAULTY.format(fault="if n > 9: os.kill(os.getppid(), 15); os._exit(2)"),
     {}, "failed requests", "reset: "),
    ("drafter/app.py", FAULTY.format(fault="if n % 10 == 0: return raw('', status=500)"),
     {}, "failed requests", "status: HTTP 500"),
    ("drafter/app.py", FAULTY.format(fault="if n == 9: return raw('{\"draft\": []}')"),
     {}, "empty drafts", "1 empty drafts in"),
    ("drafter/app.py", "\nopen(__file__ + '.cache', 'w').close()\n",
     {}, "unchanged", "drafter/app.py.cache was added"),
], ids=["starts-late", "late", "garbage", "dies", "one-in-ten", "empty", "changes-itself"])
def test_a_fault_of_the_server(mill: Mill, folder: Path, monkeypatch: pytest.MonkeyPatch, file: str,
                               text: str, rules: dict[str, float], gate: str, sentence: str):
    if gate == "start":  # then its end is not judged
        monkeypatch.setattr(selfcheck, "STOP_TIMEOUT_S", 5.0)
    add(folder, file, text)
    found = failed(rehearse(mill, folder, **rules))
    assert sentence in found.pop(gate)
    assert found.keys() <= ({"stop", "health after"} if "os._exit" in text else set())


def test_a_server_that_needs_the_network(mill: Mill, folder: Path):
    begin(folder, "exec 3<>/dev/tcp/192.0.2.1/80 || exit 7")
    found = failed(rehearse(mill, folder))
    assert found.keys() == {"start"}
    assert "Network is unreachable" in found["start"]
    assert "the grader has no network" in found["start"]


@pytest.mark.parametrize("place", ["/var/lib/drafter.cache", "/opt/x"])
def test_a_server_that_writes_outside_its_places(mill: Mill, folder: Path, place: str):
    podman_or_skip()
    begin(folder, f"echo x >{place} || exit 7")
    found = failed(rehearse(mill, folder))
    assert found.keys() == {"start"}
    assert "serve.sh ended with code 7" in found["start"]
    assert f"{place}: Read-only file system" in found["start"]
    assert "it may write to /submission, /tmp and /opt/venv only" in found["start"]


def test_a_server_may_write_where_the_contract_lets_it(mill: Mill, folder: Path):
    podman_or_skip()
    where = "/tmp/x", "/opt/venv/lib/python3.12/site-packages/x.py"
    add(folder, "drafter/app.py", f"\nfor _place in {where}:\n    open(_place, 'w').close()\n")
    assert failed(rehearse(mill, folder)) == {}


def test_a_wheel_that_was_left_out_is_missed_in_the_twin_alone(mill: Mill, folder: Path):
    """This machine's environment has sanic, the grader's has not."""
    podman_or_skip()
    (wheel,) = (folder / "wheels").glob("sanic-*.whl")
    wheel.unlink()
    listed = folder / "wheels" / "requirements.txt"
    listed.write_text("".join(line for line in listed.read_text().splitlines(keepends=True)
                              if not line.startswith("sanic==")))
    seal(folder)
    found = failed(rehearse(mill, folder))
    assert found.keys() == {"start"}
    assert "No module named 'sanic'" in found["start"]


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def link(target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "a").symlink_to(target)


def cycle(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")


def declare(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "architecture.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def modify_wheel(folder: Path) -> None:
    """Add a file to a wheel, and let every list inside the submission agree with it."""
    wheel = next((folder / "wheels").glob("aiofiles-*.whl"))
    before = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("aiofiles/more.py", "x = 1\n")
    after = hashlib.sha256(wheel.read_bytes()).hexdigest()
    listed = folder / "wheels" / "requirements.txt"
    listed.write_text(listed.read_text().replace(before, after))


def rename_wheel(tag: str) -> Callable[[Path], object]:
    def rename(folder: Path) -> None:
        wheel = next((folder / "wheels").glob("ujson-*.whl"))
        name, version = wheel.name.split("-")[:2]
        wheel.rename(wheel.with_name(f"{name}-{version}-{tag}.whl"))

    return rename


@pytest.mark.parametrize(("change", "gate", "sentence"), [
    (remove("architecture.json"), "review", "architecture.json is missing at the top"),
    (write("architecture.json", "{"), "review", "architecture.json is not JSON"),
    (write("architecture.json", "[]"), "review", "architecture.json is not a JSON object"),
    (declare(base_revision="main"), "review", "base_revision 'main' is neither"),
    (declare(training_evidence_files=["evidence/../../x"]), "review", "which is outside the submission"),
    (declare(inference_evidence_files=["/etc/passwd"]), "review", "which is outside the submission"),
    (link("/etc/hostname"), "files", "a is a link to an absolute path (/etc/hostname)"),
    (link("../x"), "files", "a is a link that leads out of the submission (../x)"),
    (link("gone"), "files", "a is a link to a file that is not there (gone)"),
    (cycle, "files", "a is a link that leads back to itself (a -> b -> a)"),
    (modify_wheel, "wheels", "was modified: its sha256"),
    (write("wheels/sanic-25.12.1.tar.gz", "x"), "wheels", "sanic-25.12.1.tar.gz is not a wheel: only .whl"),
    (rename_wheel("cp311-cp311-manylinux_2_28_x86_64"), "wheels", "2_28_x86_64.whl does not run on"),
    (rename_wheel("cp312-cp312-manylinux_2_40_x86_64"), "wheels", "2_40_x86_64.whl does not run on"),
], ids=["no-declaration", "not-json", "not-object", "branch", "evidence-out", "evidence-absolute",
        "absolute", "escaping", "dangling", "cyclic", "modified-wheel", "sdist", "python-3.11", "glibc-2.40"])
def test_a_fault_that_stops_it_before_the_start(mill: Mill, folder: Path, change: Callable[[Path], object],
                                                gate: str, sentence: str):
    change(folder)
    seal(folder)
    report = rehearse(mill, folder)
    found = failed(report)
    assert sentence in found.pop(gate)
    assert found == {}
    assert report["stage_reached"] == "files"


def test_one_byte_over_the_limit(mill: Mill, folder: Path):
    total = survey(folder).total_bytes
    found = failed(rehearse(mill, folder, limit_bytes=total - 1))
    assert f"{total:,} bytes are 1 over the limit of {total - 1:,}" in found.pop("size")
    assert found == {}


def test_by_hand_there_is_a_table_json_and_an_exit_code(mill: Mill, folder: Path):
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        options = ("--profile", "toy", "--runner", "host", "--quick", *arguments)
        command = [sys.executable, "-m", "stages.rehearse", str(folder), *options]
        return subprocess.run(command, cwd=mill.root, capture_output=True, text=True, check=False)

    done = run("--json")
    assert (done.returncode, json.loads(done.stdout)["passed"]) == (0, True)
    (folder / "architecture.json").unlink()
    done = run()
    assert done.returncode == 1
    assert "architecture.json is missing at the top" in done.stderr
    assert "FAILED" in done.stdout
    shutil.rmtree(folder)
    done = run()
    assert (done.returncode, "there is no such folder" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


def test_the_twins_venv_holds_the_lock_and_no_more(tmp_path: Path):
    venv.lay_out(tmp_path / "venv", ROOT)
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    names = {path.name for path in site.iterdir()}
    assert {"torch", "numpy", "numpy.libs", "transformers", "httpx", "pip", "nvidia"} <= names
    assert not {"sanic", "pytest", "gguf", "pydantic"} & names
    for path in site.iterdir():
        assert not path.is_symlink() or str(path.readlink()) == f"/opt/packages/{path.name}"
