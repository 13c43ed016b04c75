"""Where kernels or graphs fail, plain torch serves and the log says why; tried with stand-ins for both."""

import contextlib
import sys
from types import ModuleType

import pytest
import torch
from conftest import small_config

from drafter import trial
from drafter.graphs import Graphs
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


class Graph:
    """A stand-in for a CUDA graph: replays by a note, and fails where `fault` says so."""

    fault: Exception | None = None
    replayed = 0

    def capture_begin(self, **_):
        if Graph.fault is not None:
            raise Graph.fault

    def capture_end(self):
        pass

    def replay(self):
        Graph.replayed += 1


@pytest.fixture
def graphs(monkeypatch):
    """Return a maker of graphs that believe in a GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(Graph, "fault", None)
    monkeypatch.setattr(Graph, "replayed", 0)
    return lambda **how: Graphs(CUDA, **how)


def test_a_step_is_captured_once_and_replayed(graphs, said):
    made, ran = graphs(), []
    for _ in range(3):
        made.run("key", lambda: ran.append(1))
    assert (len(ran), Graph.replayed) == (2, 2)  # eagerly, and into the graph
    assert said() == []


@pytest.mark.parametrize("fault", [RuntimeError("not permitted"), torch.cuda.OutOfMemoryError("no memory")])
def test_after_a_failed_capture_every_step_runs_eagerly(graphs, said, monkeypatch, fault):
    made, ran = graphs(), []
    made.run("before", lambda: None)
    monkeypatch.setattr(Graph, "fault", fault)
    for key in ("key", "key", "before"):
        made.run(key, lambda: ran.append(1))
    assert (len(ran), Graph.replayed, made.enabled) == (3, 0, False)
    line, = said()
    assert line["event"] == "CUDA graphs are not used" and str(fault) in line["reason"]


def test_who_can_do_with_less_memory_is_told_that_it_is_out(graphs, monkeypatch):
    made = graphs(frugal=True)
    monkeypatch.setattr(Graph, "fault", torch.cuda.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        made.run("key", lambda: None)
    assert made.enabled
