"""Loading: block by block into place, in the served type, with torch's threads as they were before."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import small_config
from serving import write_model

from drafter import weights

ROOT = Path(__file__).resolve().parent.parent
SHAPE = [20_000, 2_048]
WATCH = """
import json, sys, threading, time
from pathlib import Path
import torch
from drafter import weights

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024

def watch():
    while not done:
        peaks.append(anonymous())
        time.sleep(0.002)

torch.zeros(1 << 20).sum()
done, peaks = [], [anonymous()]
thread = threading.Thread(target=watch)
thread.start()
_, tensors = weights.load(Path(sys.argv[1]), "cpu", torch.bfloat16)
done.append(True)
thread.join()
print(json.dumps({"result": sum(one.nbytes for one in tensors.values()), "peak": max(peaks) - peaks[0]}))
"""


@pytest.mark.parametrize("codec", ["entropy", "int4", "bf16"])
def test_the_host_holds_the_result_and_some_blocks(codec: str, tmp_path: Path) -> None:
    """A second copy of 82 MB, or float32 in between, would show."""
    told = {"x": {"codec": codec, "shape": SHAPE} | ({"group": 32} if codec == "int4" else {})}
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    parts = weights.encode({"x": weight}, told, {"x": {"steps": torch.full((SHAPE[0],), 0.9)}})
    weights.save(tmp_path / "x", small_config(), told, parts)
    done = subprocess.run([sys.executable, "-c", WATCH, str(tmp_path / "x")], cwd=ROOT, check=True, text=True,
                          capture_output=True)  # fmt: skip
    found = json.loads(done.stdout)
    assert found["result"] == 2 * weight.numel()
    assert found["peak"] < found["result"] + 60_000_000


def test_torchs_threads_are_left_as_they_were(tmp_path: Path) -> None:
    told = {"x": {"codec": "int8", "shape": [64, 64]}}
    weights.save(tmp_path / "x", small_config(), told, weights.encode({"x": torch.randn(64, 64)}, told))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        weights.load(tmp_path / "x")
        assert torch.get_num_threads() == 2
        (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1] + b"?")
        with pytest.raises(ValueError, match="damaged"):
            weights.load(tmp_path / "x")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Lazily:
    """A job whose halves say in which thread they ran."""

    def __init__(self, ran: list[tuple[str, int]]) -> None:
        self.ran = ran

    def __call__(self) -> Callable[[], None]:
        self.ran.append(("host", threading.get_ident()))
        return lambda: self.ran.append(("device", threading.get_ident()))


def test_the_second_half_of_a_task_runs_in_the_callers_thread_in_order() -> None:
    """A GPU is spoken to by one thread."""
    ran: list[tuple[str, int]] = []
    order: list[int] = []

    def task(index: int) -> Callable[[], None]:
        rest = Lazily(ran)()

        def second() -> None:
            order.append(index)
            rest()

        return second

    weights.run_all(partial(task, index) for index in range(100))
    assert order == list(range(100))
    assert {thread for half, thread in ran if half == "device"} == {threading.get_ident()}
    assert threading.get_ident() not in {thread for half, thread in ran if half == "host"}


def test_an_error_ends_the_run_without_the_tasks_that_wait() -> None:
    begun: list[int] = []

    def task(index: int) -> None:
        begun.append(index)
        if index == 3:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        weights.run_all(partial(task, index) for index in range(100_000))
    assert len(begun) < 100_000


def test_a_block_of_a_file_that_is_not_finite_is_refused_with_its_row(tmp_path: Path) -> None:
    told = {"x": {"codec": "bf16", "shape": [600, 2048]}}
    weight = torch.zeros(600, 2048)
    parts = weights.encode({"x": weight}, told)
    parts["x"][577, 3] = float("-inf")
    weights.save(tmp_path / "x", small_config(), told, parts)
    with pytest.raises(ValueError, match=r"x: tensor x, row 577: not a finite number"):
        weights.load(tmp_path / "x", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: lost")]
)
def test_a_fault_of_the_device_is_not_taken_for_damage(tmp_path, monkeypatch, error):
    """The server that meets it is started again; one over a damaged file is not."""
    folder = write_model(tmp_path / "model")

    def full(*arguments):
        raise error

    monkeypatch.setattr(weights, "empty", full)
    with pytest.raises(type(error)):
        weights.load(folder / "model.safetensors")
