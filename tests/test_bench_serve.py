"""What drafting is timed beside: transformers' static cache, and bitsandbytes' NF4 weights."""

import json

import bitsandbytes
import pytest
import torch

from benchmarks import machine, serve
from benchmarks.others import quantise
from benchmarks.shapes import SHAPES, generate, random_transformers

TOY = SHAPES["toy"]
REQUESTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_static_cache_changes_no_id():
    torch.manual_seed(1)
    model = random_transformers(TOY)
    assert torch.equal(generate(model, REQUESTS, 6, static=True), generate(model, REQUESTS, 6))


def test_nf4_stands_in_for_every_product_of_the_layers():
    torch.manual_seed(1)
    model = random_transformers(TOY)
    tokens = torch.tensor([REQUESTS[0]])
    exact = model(tokens).logits
    quantise(model)
    four = [one for one in model.modules() if isinstance(one, bitsandbytes.nn.Linear4bit)]
    assert len(four) == 7 * TOY.layers
    assert all(one.weight.quant_state.quant_type == "nf4" for one in four)
    near = torch.nn.functional.cosine_similarity(model(tokens).logits, exact, dim=-1)
    assert 0.9 < near.min() < 0.99999
    assert generate(model, REQUESTS, 6).shape == (2, 6)


def test_what_it_needs_is_asked_for_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert serve.main(["--shapes", "toy"]) == 2
    assert "need bitsandbytes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_bench_writes_down_each_beside_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    shape = ["--shapes", "toy", "--replayed", "toy", "--batches", "1", "2", "--contexts", "48"]
    assert serve.main(["--parts", "cases", "others", *shape]) == 0
    path, = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["others"].pop("shape") == "toy"
    assert set(found["others"]) == {"1x48", "2x48"}
    for case in found["others"].values():
        for kind in ("static", "nf4"):
            assert case[f"{kind}_over_ours"] == pytest.approx(case[f"{kind}_ms"] / case["ours_ms"], abs=0.1)
    assert found["toy"]["1x48"]["generate_ms"] > 0
