"""What a user may rely on when running stages: by content, whole or not at all, one at a time."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from workshop import Workshop

from stages.wrapper.runner import see_to_its_end

EVERY_STAGE = ["fetch", "data", "distill", "pack"]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path / "a house (v2)")


@pytest.fixture
def built(workshop: Workshop) -> Workshop:
    workshop.run("all")
    assert workshop.ran() == EVERY_STAGE
    return workshop


def test_a_second_run_does_nothing_and_a_touch_or_a_comment_changes_nothing(built: Workshop) -> None:
    for path in (built.root / "build" / "toy" / "data" / "rows").iterdir():
        path.touch()
    (built.root / "stages" / "distill.py").touch()
    built.replace("stages/distill.py", "def run(job):", 'def run(job):\n    """Say more."""\n    # and more')
    built.replace("stages/distill.py", '"""Work in five steps."""', '"""Another docstring."""')
    built.write("README.md", "new")
    said = built.run("all")
    assert built.ran() == []
    assert said.count("up to date") == len(EVERY_STAGE)


def test_a_changed_constant_re_runs_its_stage_and_what_follows(built: Workshop) -> None:
    built.replace("stages/grain.py", "2", "3")  # imported by distill alone
    said = built.run("all")
    assert built.ran() == ["distill", "pack"]
    assert "distill: runs, because code stages.grain changed" in said
    assert "pack: runs, because inputs distill/drafter.txt changed" in said


def test_a_changed_config_key_is_named_and_touches_only_its_readers(built: Workshop) -> None:
    built.write("profiles/toy.toml", 'extends = "smollm2"\n[distill]\nlearning_rate = 2e-3\n')
    said = built.run("all")
    assert built.ran() == ["distill", "pack"]
    assert "distill: runs, because config.distill.learning_rate changed (0.001 -> 0.002)" in said


def test_a_re_run_with_the_same_result_stops_there(built: Workshop) -> None:
    built.replace("stages/data.py", "import os", "import os, sys")
    built.run("all")
    assert built.ran() == ["data"]


def test_a_changed_input_file_of_the_repository_counts(built: Workshop) -> None:
    built.write("examples/more.jsonl", "{}\n")
    assert "files examples/more.jsonl is new" in built.run("data")
    assert built.ran() == ["data"]


@pytest.mark.parametrize("damage", ["delete", "change", "add", "link", "record"])
def test_damaged_outputs_are_repaired(built: Workshop, damage: str) -> None:
    before, path = built.outputs(), built.root / "output" / "model.txt"
    content, times = path.read_bytes(), path.stat()
    if damage == "delete":
        path.unlink()
    elif damage == "change":  # with the size and times of the original
        path.write_bytes(content[::-1])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif damage == "add":
        (path.parent / "stray.bin").write_bytes(b"0" * 100)
    elif damage == "link":
        path.rename(built.root / "elsewhere.txt")
        path.symlink_to(built.root / "elsewhere.txt")
    else:
        built.write("logs/toy/pack.json", "{")
    built.run("all")
    assert built.ran() == ["pack"]
    assert {name: data for name, data in built.outputs().items() if name in before} == before
    assert not (path.parent / "stray.bin").exists()


def test_damaged_inputs_are_refused_by_name(built: Workshop) -> None:
    built.write("build/toy/data/rows/a.txt", "wrong")
    built.replace("stages/grain.py", "2", "3")
    said = built.run("distill", code=2)
    assert "build/toy/data/rows/a.txt differs from its record; make data repairs it" in said
    built.run("distill", "--with-upstream")
    assert built.ran() == ["data", "distill"]


@pytest.mark.parametrize("victim", ["stage", "wrapper"])
def test_kill_9_and_then_the_same_bytes_from_where_it_was(tmp_path: Path, victim: str) -> None:
    undisturbed, killed = Workshop(tmp_path / "one"), Workshop(tmp_path / "two")
    undisturbed.run("all")
    killed.close_gate(2)
    process = killed.start("all")
    worker = killed.wait_for_arrival()
    os.kill(worker if victim == "stage" else process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    _wait_for_end(worker)
    killed.open_gate()
    killed.run("all")
    assert killed.ran() == ["fetch", "data", "distill", "distill", "pack"]
    assert killed.record("distill")["predicate"]["runDetails"]["metadata"]["draftmill_run"]["metrics"] == {
        "resumed_at": 3}
    names = [name for name in killed.outputs() if "/." not in name]
    assert {name: killed.outputs()[name] for name in names} == {
        name: data for name, data in undisturbed.outputs().items() if "/." not in name}
    assert not list((killed.root / "build" / "toy" / ".work").glob("distill-*"))
    assert not list((killed.root / "build" / "toy").glob(".*.partial"))


def test_a_kill_between_moving_in_and_recording_is_repaired(built: Workshop) -> None:
    before = built.outputs()
    (built.root / "output").rename(built.root / ".output.old")
    (built.root / ".output.partial").mkdir()
    (built.root / ".output.partial" / "half.txt").write_text("half")
    (built.root / "logs" / "toy" / "pack.json").unlink()
    built.run("all")
    assert built.ran() == ["pack"]
    assert {name: built.outputs()[name] for name in before} == before
    assert not list(built.root.glob(".output.*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_is_passed_on_without_traceback(workshop: Workshop, number: int, code: int) -> None:
    workshop.close_gate(1)
    process = workshop.start("all")
    worker = workshop.wait_for_arrival()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    assert "goes on from where it was" in err
    _wait_for_end(worker)
    assert not (workshop.root / "logs" / "toy" / "distill.json").exists()


@pytest.mark.parametrize(("pause_s", "code"), [(0.1, 143), (2.5, 137)])
def test_a_stage_may_save_unless_its_user_asks_again(tmp_path: Path, pause_s: float, code: int) -> None:
    """make passes on what its whole group is sent: that is no second request."""
    story = ("import pathlib, signal, sys, time\n"
             "def stop(number, _frame):\n"
             "    time.sleep(4)\n"
             "    pathlib.Path('saved').touch()\n"
             "    sys.exit(128 + number)\n"
             "signal.signal(signal.SIGTERM, stop)\n"
             "pathlib.Path('ready').touch()\n"
             "time.sleep(600)\n")
    child = subprocess.Popen([sys.executable, "-c", story], cwd=tmp_path, start_new_session=True)

    def ask() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        for pause in (pause_s, 0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(pause)

    asking = threading.Thread(target=ask)
    asking.start()
    assert see_to_its_end(child, child.kill) == code
    asking.join()
    assert (tmp_path / "saved").exists() == (code == 143)


def test_two_at_once_run_each_stage_once(workshop: Workshop) -> None:
    workshop.close_gate(0)
    first = workshop.start("all")
    workshop.wait_for_arrival()
    second = workshop.start("all")
    assert "waiting" in second.stderr.readline()
    workshop.open_gate()
    (workshop.root / "never").open("w").close()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
    assert workshop.ran() == EVERY_STAGE


def test_two_profiles_share_output_and_each_gets_its_own(built: Workshop) -> None:
    built.write("profiles/other.toml", 'extends = "smollm2"\n[distill]\nlearning_rate = 2e-3\n')
    built.run("all", "--profile", "other")
    assert built.ran() == ["fetch", "data", "distill", "pack"]
    assert (built.root / "output" / "model.txt").read_text().endswith("0.002")
    built.run("all")
    assert built.ran() == ["pack"]
    assert (built.root / "output" / "model.txt").read_text().endswith("0.001")


def test_a_fault_is_a_sentence_and_its_traceback_is_in_the_log(workshop: Workshop) -> None:
    workshop.replace("stages/data.py", "    count(job)\n", '    raise ValueError("the word is odd")\n')
    said = workshop.run("all", code=1)
    assert "draftmill: data: failed: ValueError: the word is odd; the whole story is in logs/toy/data" in said
    assert "Traceback" not in said
    events = [json.loads(line) for line in (workshop.root / "logs/toy/data.log").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "failed"]
    assert "Traceback" in events[-1]["traceback"]
    # The log travels with the submission.
    places = (str(workshop.root), sys.prefix, sys.base_prefix, str(Path.home()))
    assert [place for place in places if place in json.dumps(events)] == []
    assert 'File "./stages/data.py"' in events[-1]["traceback"]


def test_a_users_mistake_in_a_stage_exits_2(workshop: Workshop) -> None:
    workshop.replace("stages/data.py", "    count(job)\n",
                     '    from stages.errors import UserError\n    raise UserError("feed it")\n')
    assert "draftmill: data: feed it" in workshop.run("all", code=2)


def test_a_mistake_is_told_while_a_thread_is_still_at_work(workshop: Workshop) -> None:
    workshop.replace("stages/data.py", "    count(job)\n", (
        "    import threading\n    from concurrent.futures import ThreadPoolExecutor\n"
        "    from stages.errors import UserError\n"
        "    ThreadPoolExecutor(1).submit(threading.Event().wait, 100)\n    raise UserError('no rows')\n"))
    process = workshop.start("data", "--with-upstream")
    _, err = process.communicate(timeout=50)
    assert process.returncode == 2
    assert err.endswith("draftmill: data: no rows\n")


def test_links_among_outputs_are_refused(workshop: Workshop) -> None:
    link = '    (job.out / "link").symlink_to("/etc/passwd")\n'
    workshop.replace("stages/data.py", "    return", f"{link}    return")
    assert "left link, which is not a regular file" in workshop.run("all", code=2)


def test_a_profile_for_a_gpu_stops_where_there_is_none(workshop: Workshop) -> None:
    workshop.write("profiles/toy.toml", 'extends = "smollm2"\ndevice = "cuda"\n')
    workshop.replace("stages/data.py", "TAKES", 'LIBRARIES = ("torch",)\nTAKES')
    said = workshop.run("all", code=2, CUDA_VISIBLE_DEVICES="")
    assert "data: the profile says device = 'cuda', which needs 1 GPU, and 0 can be used here" in said
    assert workshop.ran() == ["fetch"]  # which needs none


def test_mistakes_on_the_command_line(workshop: Workshop) -> None:
    said = workshop.run("all", "--runner", "hots", code=2)
    assert "RUNNER=hots: there is no such runner. Runners: docker, podman, host, system" in said
    assert "Stages: fetch, data, distill, pack" in workshop.run("distil", code=2)
    assert "data has not run: make data" in workshop.run("distill", code=2)
    workshop.replace("stages/data.py", '"fetch/{target.source}/*"', '"fetsh"')
    assert "TAKES names fetsh, which is no stage" in workshop.run("data", code=2)


def test_on_a_shared_disk_checkpoints_of_others_stay(workshop: Workshop) -> None:
    shared = workshop.root.with_name("a shared disk")
    workshop.write("profiles/toy.toml", f'extends = "smollm2"\n[checkpoints]\nfolder = "{shared}"\n')
    theirs = shared / "toy" / "distill-0123456789abcdef" / "done.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("drow")
    workshop.run("all")
    assert [path for path in shared.rglob("*") if path.is_file()] == [theirs]


def test_a_borrowed_python_keeps_the_libraries_that_it_is_told_of(workshop: Workshop) -> None:
    workshop.write("borrowed/oddity.py", "")
    workshop.replace("stages/data.py", "import os\n", "import os, oddity\n")
    where = {"PYTHONPATH": str(workshop.root / "borrowed")}
    said = workshop.run("data", "--with-upstream", RUNNER="host", code=1, **where)
    assert "No module named 'oddity'" in said
    workshop.run("data", RUNNER="system", **where)


CANARY = "hf_CANARYcanaryCANARY000"


def test_secrets_reach_fetch_alone_and_nothing_that_is_written(workshop: Workshop) -> None:
    look = ('    import os\n    seen = os.environ.get("HF_TOKEN", "") + os.environ.get("HTTPS_PROXY", "")\n'
            '    job.say(f"seen {len(seen)} {seen}")\n')
    for stage in ("fetch", "data"):
        workshop.replace(f"stages/{stage}.py", "    count(job)\n", "    count(job)\n" + look)
    workshop.replace("stages/fetch.py", '"files": 1', '"files": seen')
    secrets = {"HF_TOKEN": CANARY, "HTTPS_PROXY": "http://user:pw-CANARY@proxy:1",
               "PIP_INDEX_URL": "http://u:pw-CANARY@i/"}
    said = workshop.run("all", **secrets)
    raising = '    raise ValueError("401" + 280 * " " + seen)\n    return {'
    workshop.replace("stages/fetch.py", "    return {", raising)
    said += workshop.run("fetch", code=1, **secrets)
    assert "data: seen 0" in said
    assert "fetch: seen 0" not in said
    assert "CANARY" not in said
    for path in workshop.root.rglob("*"):
        if path.is_file() and "stages" not in path.parts:
            assert b"CANARY" not in path.read_bytes(), path


def test_secrets_stand_in_no_argument_and_no_later_environment(workshop: Workshop) -> None:
    workshop.close_gate(0)
    process = workshop.start("all", HF_TOKEN=CANARY, HTTP_PROXY="http://user:pw-CANARY@proxy:1")
    worker = workshop.wait_for_arrival()
    for pid in (worker, process.pid):
        assert b"CANARY" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=60)
    assert b"CANARY" not in environment
    assert b"HF_HUB_OFFLINE=1" in environment
    assert b"OMP_WAIT_POLICY=PASSIVE" in environment


def test_the_wrapper_plans_without_importing_stages(workshop: Workshop) -> None:
    workshop.replace("stages/data.py", "import os\n", "import os, no_such_module\n")
    assert "data: Turn the word over." in workshop.run(module="plan")


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 60)[0], "the worker outlived its wrapper"
    os.close(handle)
