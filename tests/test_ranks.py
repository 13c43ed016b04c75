"""Ranks share a teacher's shards: what one rank writes, whoever dies."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from mill import Mill, finished, wait_for_end
from trainers import make_job

from stages.errors import UserError
from stages.ranks import Ranks, claimed, ranks_asked
from stages.teacher import EVALUATION_SETS, tasks_of

SHARD = re.compile(r"claims/(train-\d+\.safetensors)$")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.fixture
def copy(undisturbed: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mill:
    """The same mill before its teacher, with two ranks to come."""
    monkeypatch.setenv("NPROC", "2")
    mill = undisturbed.copy(tmp_path / "copy")
    mill.forget("teacher")
    return mill


def started(mill: Mill) -> tuple["subprocess.Popen[str]", list[int]]:
    """A teacher at work, and the process ids of its two ranks."""
    process = mill.start("teacher")
    limit = time.monotonic() + 120
    while len(pids := [event["pid"] for event in mill.events("teacher") if event["event"] == "rank"]) < 2:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < limit
        time.sleep(0.002)
    return process, pids


def shards_at(pid: int) -> set[str]:
    """The shards whose claims a process holds or waits for."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found |= set(SHARD.findall(str(link.readlink())))
        except OSError:
            continue
    return found


def wait_until_stopped(pid: int) -> None:
    """Wait until every thread of a process has been stopped."""
    limit = time.monotonic() + 120
    threads = Path(f"/proc/{pid}/task")
    while time.monotonic() < limit:
        with suppress(OSError):  # one may end meanwhile
            if all("State:\tT" in path.read_text() for path in threads.glob("*/status")):
                return
    raise AssertionError("it was never stopped")


def caught(mill: Mill) -> tuple["subprocess.Popen[str]", list[int], int, str]:
    """A teacher at work, its ranks' process ids, and who of them was stopped at which shard."""
    for _ in range(5):
        process, pids = started(mill)
        if found := stopped_at_a_shard(mill, process, pids):
            return process, pids, *found
        mill.forget("teacher")  # the machine was busy elsewhere, and it was done meanwhile
    raise AssertionError("no rank was ever found at a shard")


def stopped_at_a_shard(mill: Mill, process: "subprocess.Popen[str]",
                       pids: list[int]) -> tuple[int, str] | None:
    """Stop whichever rank is first found in the midst of a shard: its number, and the shard's name."""
    while process.poll() is None:
        for rank, pid in enumerate(pids):
            if not shards_at(pid):
                continue
            os.kill(pid, signal.SIGSTOP)
            wait_until_stopped(pid)
            own = shards_at(pid) - shards_at(pids[1 - rank])
            if unfinished := [name for name in own if not mill.work("teacher", name)]:
                return rank, unfinished[0]
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    assert process.returncode == 0, process.stdout.read()
    return None


def wait_for(what: object, process: "subprocess.Popen[str]") -> None:
    limit = time.monotonic() + 120
    while not what():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < limit
        time.sleep(0.01)


def made(mill: Mill) -> list[str]:
    return sorted(event["file"] for event in mill.events("teacher") if event["event"] == "shard")


def test_two_ranks_write_what_one_writes_and_no_key_knows_of_them(
        copy: Mill, undisturbed: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 ranks" in copy.run("teacher")
    assert copy.files("teacher") == undisturbed.files("teacher")
    assert copy.metrics("teacher") == undisturbed.metrics("teacher")
    assert made(copy) == made(undisturbed)
    monkeypatch.delenv("NPROC")
    assert "teacher: up to date" in copy.run("teacher")


def test_a_killed_ranks_shard_is_done_by_the_other_and_no_finished_one_twice(
        copy: Mill, undisturbed: Mill) -> None:
    process, pids, rank, lost = caught(copy)
    # The other does all the rest, and stands at the claim of the one that is missing; it has looked at that
    # claim before, without waiting.
    rest = set(made(undisturbed)) - {lost}
    wait_for(lambda: set(made(copy)) == rest and lost in shards_at(pids[1 - rank]), process)
    os.kill(pids[rank], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"rank {rank} was ended from outside (exit code -9)" in said
    assert made(copy) == made(undisturbed)
    assert copy.files("teacher") == undisturbed.files("teacher")
    assert copy.metrics("teacher") == undisturbed.metrics("teacher")


def test_where_all_are_killed_the_same_command_goes_on(
        copy: Mill, undisturbed: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    process, pids, _, lost = caught(copy)
    wait_for(lambda: made(copy), process)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "goes on from where it was" in said.splitlines()[-1]
    whole = made(copy)
    assert lost not in whole
    monkeypatch.delenv("NPROC")
    copy.run("teacher")
    assert made(copy) == made(undisturbed)  # each once: what was whole is not among those of the second run
    assert copy.files("teacher") == undisturbed.files("teacher")


def test_ranks_die_with_their_stage(copy: Mill) -> None:
    process, pids = started(copy)
    handles = [os.pidfd_open(pid) for pid in pids]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    for handle in handles:
        wait_for_end(handle)


def test_a_task_goes_to_one_and_comes_free_with_its_end(tmp_path: Path) -> None:
    done: set[str] = set()
    first, second = (claimed(tmp_path, ["a", "b", "c"], done.__contains__) for _ in range(2))
    assert next(first) == "a"
    assert next(second) == "b"
    done.add("b")
    assert next(second) == "c"
    done.add("c")
    first.close()  # as if killed: its lock is gone, and its task is not done
    assert next(second) == "a"
    done.add("a")
    assert list(second) == []


def test_what_ranks_return_or_failed_of_is_told(tmp_path: Path) -> None:
    for name in (*EVALUATION_SETS, "train"):
        (tmp_path / f"{name}.jsonl").touch()
    job = replace(make_job(tmp_path), inputs={"data": tmp_path})
    ends = []
    for work in (attrgetter("seed"), attrgetter("nothing"), tasks_of):
        with Ranks(job, 1, work) as ranks:
            while ranks.alive(60):
                pass
        ends.append((ranks.answers, ranks.faults))
    assert ends[0] == ({0: job.seed}, {})
    assert isinstance(ends[1][1][0], RuntimeError)
    assert "rank 0: AttributeError" in str(ends[1][1][0])
    assert isinstance(ends[2][1][0], UserError)
    assert "no training prompt" in str(ends[2][1][0])


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_a_number_of_ranks_that_is_none_is_a_sentence(
        text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", text)
    with pytest.raises(UserError, match=f"NPROC takes a number of processes, 1 or more .found '{text}'"):
        ranks_asked(make_job(tmp_path))


def test_more_ranks_than_gpus_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path)
    on_gpu = replace(job, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("NPROC", raising=False)
    assert ranks_asked(on_gpu) == 1
    monkeypatch.setenv("NPROC", "2")
    assert ranks_asked(job) == 2
    assert ranks_asked(replace(job, reach=("http://127.0.0.1:8000",))) == 1
    with pytest.raises(UserError, match=r"NPROC=2 needs as many GPUs, and 1 can be used here.*say NPROC=1"):
        ranks_asked(on_gpu)
