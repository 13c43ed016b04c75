"""Where kernels or graphs fail, plain torch serves and the log says why; tried with stand-ins for both."""

import contextlib
import gc
import sys
import weakref
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import small_config

from drafter import cuda, trial
from drafter.graphs import Graphs
from drafter.limits import DEVICE, Fault
from drafter.settings import PLAIN

CUDA = torch.device("cuda")


@pytest.fixture
def said(caplog):
    """What is logged: event and fields."""
    return lambda: [{"event": record.getMessage(), **record.fields} for record in caplog.records]


@pytest.fixture
def stub(monkeypatch):
    """A stand-in for the kernels, of which `found` says by how much they differ, or raises."""
    kernels = ModuleType("drafter.kernels")
    kernels.found = lambda: {}
    monkeypatch.setitem(sys.modules, "drafter.kernels", kernels)
    monkeypatch.setattr("drafter.kernels", kernels, raising=False)
    monkeypatch.setattr(trial, "differences", lambda kernels, *_: kernels.found())
    monkeypatch.delenv(PLAIN, raising=False)
    trial.trusted.cache_clear()
    yield kernels
    trial.trusted.cache_clear()


def trusted():
    trial.trusted.cache_clear()
    return trial.trusted(small_config(), torch.bfloat16, CUDA)


def test_kernels_are_used_where_they_do_as_plain_torch_does(stub, said):
    stub.found = lambda: {"norm": 0.0, "rotation": 0.05}
    assert trusted() is stub
    assert said() == []


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.2])
def test_kernels_that_differ_are_not_used(stub, said, error):
    stub.found = lambda: {"norm": 0.0, "rotation": error}
    assert trusted() is None
    line, = said()
    assert line["event"] == "kernels are not used" and "rotation" in line["reason"]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal access"), ImportError("no triton"), OSError("no gcc")]
)
def test_kernels_that_fail_are_not_used(stub, said, error):
    def fail():
        raise error

    stub.found = fail
    assert trusted() is None
    line, = said()
    assert line["event"] == "kernels are not used" and str(error) in line["reason"]


def test_kernels_are_not_even_tried_where_the_supervisor_says_so(stub, monkeypatch):
    stub.found = lambda: pytest.fail("they were tried")
    monkeypatch.setenv(PLAIN, "1")
    assert trusted() is None


STREAM, CURRENT, RECORDED, MADE = 7, 8, 11, 12  # handles


class Driver:
    """A stand-in for the CUDA driver: it notes what is called, and refuses what `refused` names."""

    def __init__(self):
        self.called, self.refused, self.spoilt, self.pools = [], {}, False, 0

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *arguments):
        self.called.append((name, *(one.value for one in arguments if hasattr(one, "value"))))
        if name == "cuGetErrorString":
            arguments[1]._obj.value = b"in its own words"
        if name in self.refused:
            return self.refused[name]
        if name == "cuStreamEndCapture" and not self.spoilt:
            arguments[1]._obj.value = RECORDED
        if name == "cuGraphInstantiateWithFlags":
            arguments[0]._obj.value = MADE
        return 0

    @contextlib.contextmanager
    def within(self, name, _):
        self.called.append((name, "entered"))
        try:
            yield
        finally:
            self.called.append((name, "left"))

    def pool(self):
        self.pools += 1
        return SimpleNamespace()

    def count(self, name):
        return sum(one == name for one, *_ in self.called)


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.called.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "stream", partial(found.within, "stream"))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", partial(found.within, "pool"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=CURRENT))
    monkeypatch.setattr(torch.cuda, "MemPool", found.pool)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=STREAM, device=CUDA))
    return found


def test_a_step_is_captured_once_and_replayed(driver, said):
    made, collecting = Graphs(CUDA), []
    for _ in range(3):
        made.run("key", lambda: collecting.append(gc.isenabled()))
    assert collecting == [True, False]  # eagerly, and into the graph
    assert gc.isenabled()
    assert said() == []
    del made
    gc.collect()
    assert driver.called[-1] == ("synchronize",)  # before its memory is given back
    assert driver.called[:-1] == [
        ("synchronize",), ("stream", "entered"), ("pool", "entered"), ("cuStreamBeginCapture_v2", STREAM, 1),
        ("cuStreamEndCapture", STREAM), ("pool", "left"), ("stream", "left"),
        ("cuGraphInstantiateWithFlags", RECORDED, 0), ("cuGraphDestroy", RECORDED),
        ("cuGraphLaunch", MADE, CURRENT), ("cuGraphLaunch", MADE, CURRENT), ("cuGraphExecDestroy", MADE),
    ]  # fmt: skip


def test_graphs_of_one_kind_share_their_memory(driver):
    made = Graphs(CUDA)
    for key in "abc":
        made.run(key, lambda: None)
    assert (len(made.captured), driver.pools) == (3, 1)


@pytest.mark.parametrize("why", ["they differ", "a capture fails"])
def test_graphs_that_are_given_up_keep_no_memory(driver, why):
    made = Graphs(CUDA)
    made.run("key", lambda: None)
    memory = weakref.ref(made.memory)
    if why == "they differ":
        made.disable(why)
    else:
        driver.refused["cuStreamEndCapture"] = 900
        made.run("another", lambda: None)
    assert not made.enabled and memory() is None
    made.run("key", lambda: None)


def test_a_graph_that_outlives_its_driver_is_given_back_to_it(driver, monkeypatch):
    made = Graphs(CUDA)
    made.run("key", lambda: None)
    monkeypatch.setattr(cuda, "driver", lambda: pytest.fail("another driver"))
    del made
    gc.collect()
    assert driver.count("cuGraphExecDestroy") == 1


@pytest.mark.parametrize("lost", [False, True])
def test_the_memory_of_a_lost_device_is_never_given_back(driver, monkeypatch, lost):
    """torch would end the process over it."""
    def synchronize():
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    kept = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(cuda.ctypes.pythonapi, "Py_IncRef", lambda one: kept.append(one.value))
    memory = cuda.Memory()
    pool = memory.pool
    del memory
    assert kept == ([pool] if lost else [])


@pytest.mark.parametrize("name", ["cuStreamBeginCapture_v2", "cuStreamEndCapture",
                                  "cuGraphInstantiateWithFlags"])  # fmt: skip
def test_after_a_refused_capture_every_step_runs_eagerly(driver, said, name):
    made, ran = Graphs(CUDA), []
    made.run("before", lambda: None)
    driver.refused[name] = 900
    for key in ("key", "key", "before"):
        made.run(key, lambda: ran.append(1))
    assert driver.count("cuGraphLaunch") == 0 and not made.enabled
    assert len(ran) == (3 if name == "cuStreamBeginCapture_v2" else 4)  # once more into the recording
    line, = said()
    assert line["event"] == "CUDA graphs are not used" and f"in its own words ({name}: 900)" in line["reason"]
    ended = driver.count("cuGraphDestroy"), driver.count("cuGraphExecDestroy")
    assert ended == (2 if name == "cuGraphInstantiateWithFlags" else 1, 1)  # nothing is left behind


class Step:
    """A step that fails while it is recorded: the first time it runs eagerly."""

    def __init__(self, error):
        self.error, self.ran = error, 0

    def __call__(self):
        self.ran += 1
        if self.ran == 2:
            raise self.error


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("fault", [RuntimeError("not permitted"), torch.cuda.OutOfMemoryError("no memory")])
def test_after_a_failed_capture_every_step_runs_eagerly(driver, said, fault, spoilt):
    made, step = Graphs(CUDA), Step(fault)
    driver.spoilt = spoilt
    for _ in range(3):
        made.run("key", step)
    assert (step.ran, made.enabled, driver.count("cuGraphLaunch")) == (4, False, 0)
    assert driver.count("cuStreamEndCapture") == 1 and driver.count("cuGraphDestroy") == int(not spoilt)
    assert driver.called[-1] == ("stream", "left")
    line, = said()
    assert line["event"] == "CUDA graphs are not used" and str(fault) in line["reason"]


def test_who_can_do_with_less_memory_is_told_that_it_is_out(driver):
    made, step = Graphs(CUDA, frugal=True), Step(torch.cuda.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        made.run("key", step)
    driver.refused["cuGraphInstantiateWithFlags"] = cuda.OUT_OF_MEMORY
    with pytest.raises(torch.cuda.OutOfMemoryError):
        made.run("key", lambda: None)
    assert made.enabled


@pytest.mark.parametrize("error", [OSError("no libcuda.so.1"), AttributeError("no such symbol")])
def test_without_a_driver_that_can_every_step_runs_eagerly(driver, said, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(cuda, "driver", fail)
    made, ran = Graphs(CUDA), []
    for _ in range(2):
        made.run("key", lambda: ran.append(1))
    assert (len(ran), made.enabled) == (2, False)
    assert str(error) in said()[0]["reason"]


def test_a_launch_that_the_driver_refuses_is_a_fault_of_the_device(driver):
    made = Graphs(CUDA)
    made.run("key", lambda: None)
    driver.refused["cuGraphLaunch"] = 719
    with pytest.raises(RuntimeError) as raised:
        made.run("key", lambda: None)
    assert Fault.of(raised.value).kind == DEVICE
