"""kill -9 in teacher, distill and qat: the same command goes on, and leaves what a run in peace leaves."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from mill import Mill, MissedError, finished, moments

from stages.files import read_jsonl
from stages.training.loss import learning_rate

FINISHED = {"teacher": "*.*", "distill": "checkpoint-*.safetensors", "qat": "checkpoint-*.safetensors"}
STEPS = {"distill": 12, "qat": 9}
MARKS = {"teacher": range(5), "distill": range(10), "qat": range(7)}  # the last leaves three steps, two sets
WHOM = ("worker", "wrapper", "both")


@dataclass(frozen=True)
class Trial:
    """A stage that was killed and has finished; what was whole before its last start, and what happened."""

    mill: Mill
    whole: list[str]
    story: str


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.fixture(scope="module")
def trials(undisturbed: Mill, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Each stage, killed and finished in a repository of its own; two at a time."""
    seed = int(os.environ.get("DRAFTMILL_TEST_SEED") or time.time_ns() % 1_000_000)
    folder = tmp_path_factory.mktemp("killed")
    with ThreadPoolExecutor(2) as pool:
        yield {"steps": pool.submit(_killed_then_shortened, undisturbed.copy(folder / "steps"))} | {
            stage: pool.submit(_killed_three_times, undisturbed.copy(folder / stage), stage, seed)
            for stage in FINISHED
        }


def _killed_three_times(mill: Mill, stage: str, seed: int) -> Trial:
    """Kill a stage at three random moments, plant debris, and let it finish."""
    drawn = moments(f"{seed}/{stage}", MARKS[stage])
    order = random.Random(f"{seed}/{stage}").sample(WHOM, 3)
    story = f"DRAFTMILL_TEST_SEED={seed}: {stage} was killed at {drawn}, {order}"
    try:
        _caught(mill, stage, [(*moment, whom) for moment, whom in zip(drawn, order, strict=True)])
        whole = _plant_debris(mill, stage)
        mill.run(stage)
    except AssertionError as error:
        error.add_note(story)
        raise
    return Trial(mill, whole, story)


def _caught(mill: Mill, stage: str, kills: list[tuple[int, float, str]]) -> None:
    """Kill a stage, which is to begin anew, at each of some moments; where one is missed, all of it again."""
    for _ in range(5):
        mill.forget(stage)
        try:
            for mark, delay_s, whom in kills:
                mill.kill(stage, lambda mark=mark: _progress(mill, stage) >= mark, delay_s, whom)
        except MissedError:
            continue
        return
    raise AssertionError(f"{stage} ended five times before it could be killed")


def _progress(mill: Mill, stage: str) -> int:
    """How many shards and sets are finished, or the step of the newest checkpoint."""
    names = [path.stem for path in mill.work(stage, FINISHED[stage]) if path.suffix != ".partial"]
    if stage == "teacher":
        return len(names)
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def _plant_debris(mill: Mill, stage: str) -> list[str]:
    """Leave what a kill while writing could; return the names of the files that are whole."""
    whole = [path for path in mill.work(stage, FINISHED[stage]) if path.suffix != ".partial"]
    # The sets of conversations come whole by one rename; shards and checkpoints are looked into as well.
    first = next((path for path in whole if path.suffix == ".safetensors"), None)
    for path in whole:
        content = path.read_bytes()
        path.with_suffix(".partial").write_bytes(content[:1000])
        if path == first:
            cut = path if stage == "teacher" else path.with_name("checkpoint-00000099.safetensors")
            cut.write_bytes(content[: len(content) // 2])
    return [path.name for path in whole if stage != "teacher" or path != first]


def _killed_then_shortened(mill: Mill) -> Mill:
    _caught(mill, "distill", [(6, 0.0, "both")])
    mill.replace("profiles/toy.toml", "steps = 12\n", "steps = 10\n")
    mill.run("distill")
    return mill


@pytest.mark.parametrize("stage", FINISHED)
def test_after_three_kills_the_outputs_are_byte_for_byte_the_same(
        undisturbed: Mill, trials: dict[str, Future], stage: str) -> None:
    trial, expected = trials[stage].result(), undisturbed.files(stage)
    mill, found = trial.mill, trial.mill.files(stage)
    assert found.keys() == expected.keys(), trial.story
    assert [name for name in found if found[name] != expected[name]] == [], trial.story
    assert len([event for event in mill.events(stage) if event["event"] == "started"]) == 4
    assert mill.metrics(stage) == undisturbed.metrics(stage)
    assert not mill.work(stage, "*")


def test_no_whole_shard_is_made_twice(undisturbed: Mill, trials: dict[str, Future]) -> None:
    trial = trials["teacher"].result()
    last = [event for event in _last_start(trial.mill, "teacher") if event["event"] == "shard"]
    made = [event["file"] for event in last]
    shards = {name for name in undisturbed.files("teacher") if name.startswith("train-")}
    assert sorted(made) == sorted(shards - set(trial.whole)), trial.story
    runs = trial.mill.told("teacher")["runs"]
    assert runs[-1]["tokens"] == sum(event["tokens"] for event in last), trial.story
    assert sum(run["tokens"] for run in runs) == undisturbed.metrics("teacher")["tokens"], trial.story


@pytest.mark.parametrize("stage", STEPS)
def test_training_goes_on_from_its_newest_whole_checkpoint(trials: dict[str, Future], stage: str) -> None:
    trial = trials[stage].result()
    step = max(int(Path(name).stem.rpartition("-")[2]) for name in trial.whole)
    texts = [event["text"] for event in _last_start(trial.mill, stage) if event["event"] == "say"]
    assert f"resumes at step {step}" in texts[:2], trial.story


@pytest.mark.parametrize(("stage", "steps", "peak"), [("distill", 12, 4e-3), ("qat", 9, 1e-3)])
def test_learning_rates_by_step_are_those_of_one_run(
        trials: dict[str, Future], stage: str, steps: int, peak: float) -> None:
    expected = [learning_rate(step, steps, 2, peak) for step in range(steps)]
    assert _rates(trials[stage].result().mill, stage) == expected


def test_another_number_of_steps_starts_anew_on_a_curve_of_its_own(trials: dict[str, Future]) -> None:
    mill = trials["steps"].result()
    texts = [event.get("text", "") for event in _last_start(mill, "distill")]
    assert not any("resumes" in text for text in texts)
    assert _rates(mill, "distill") == [learning_rate(step, 10, 2, 4e-3) for step in range(10)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_saved_to_the_step(undisturbed: Mill, tmp_path: Path, number: int) -> None:
    mill = undisturbed.copy(tmp_path / "copy")
    mill.replace("profiles/toy.toml", "minutes = 0", f'minutes = 60\nfolder = "{tmp_path / "disk"}"')
    mill.forget("distill")
    process = mill.start("distill")
    _wait_for_training(mill, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    saved = [int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("disk/toy/distill-*/checkpoint-*")]
    assert len(saved) == 1
    assert f"stopped by signal {number} after step {saved[0]}, and saved" in said
    assert "goes on from where it was" in said
    assert f"resumes at step {saved[0]}" in mill.run("distill")
    assert mill.files("distill") == undisturbed.files("distill")
    assert not list(tmp_path.glob("disk/toy/distill-*"))


def test_the_end_of_a_terminal_is_a_stop_that_saves(undisturbed: Mill, tmp_path: Path) -> None:
    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs this may have it ignored
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    mill = undisturbed.copy(tmp_path / "copy")
    mill.replace("profiles/toy.toml", "minutes = 0", "minutes = 60")
    mill.forget("distill")
    ours, theirs = os.openpty()
    process = mill.start("distill", stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    _wait_for_training(mill, process)
    os.close(ours)
    assert process.wait(60) == 128 + signal.SIGTERM
    saved, = mill.work("distill", "checkpoint-*")
    assert f"resumes at step {int(saved.stem.rpartition('-')[2])}" in mill.run("distill")
    assert mill.files("distill") == undisturbed.files("distill")


def test_work_goes_on_when_nobody_reads_what_it_says(undisturbed: Mill, tmp_path: Path) -> None:
    mill = undisturbed.copy(tmp_path / "copy")
    mill.forget("distill")
    process = mill.start("distill")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(120) == 0
    assert mill.files("distill") == undisturbed.files("distill")
    assert any(event.get("text", "").startswith("simulated tau") for event in mill.events("distill"))


def test_a_kill_while_the_outputs_move_in_leaves_no_stale_record(undisturbed: Mill, tmp_path: Path) -> None:
    # As if killed between removing the record and writing the new one: outputs there, record gone.
    mill = undisturbed.copy(tmp_path / "copy")
    (mill.root / "logs" / "toy" / "wheels.json").unlink()
    shutil.copytree(mill.root / "wheels", mill.root / ".wheels.partial")
    assert "wheels: runs, because it has no record" in mill.run("wheels")
    assert mill.files("wheels") == undisturbed.files("wheels")
    assert not (mill.root / ".wheels.partial").exists()


def _wait_for_training(mill: Mill, process: "subprocess.Popen[str]") -> None:
    while len(mill.events("distill")) < 2:
        assert process.poll() is None, mill.events("distill")
        time.sleep(0.002)


def _rates(mill: Mill, stage: str) -> list[float]:
    lines = read_jsonl(mill.folder(stage) / "training.jsonl")
    return [line["rate"] for line in lines if "rate" in line]


def _last_start(mill: Mill, stage: str) -> list[dict]:
    events = mill.events(stage)
    started = [index for index, event in enumerate(events) if event["event"] == "started"]
    return events[started[-1] :]
