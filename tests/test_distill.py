"""The start of distill: which layers of a model the drafter keeps."""

import json
from pathlib import Path

import pytest
import torch
from conftest import small_config, small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from mill import finished
from pydantic import ValidationError

from drafter.model import build
from stages.distill import fresh, prune
from stages.errors import UserError
from stages.profile import Start

LAYERS = 5
FULL = small_decoder("qwen3", seed=81, layers=LAYERS)
CONFIG, TENSORS = FULL.config, dict(FULL.state_dict())
TOKENS = torch.arange(12)[None]
subsets = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(lambda layers: tuple(sorted(layers)))


@settings(max_examples=15)
@given(subsets)
@torch.no_grad()
def test_the_kept_layers_work_as_they_did(layers: tuple[int, ...]) -> None:
    config, tensors = prune(CONFIG, TENSORS, layers)
    assert config == small_config("qwen3", layers=len(layers))
    pruned = build(config, tensors, torch.float32, "cpu")
    whole = small_decoder("qwen3", seed=81, layers=LAYERS)
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[layer] for layer in layers)
    assert torch.equal(pruned(TOKENS, TOKENS), whole(TOKENS, TOKENS))


def test_layers_are_renumbered_and_the_rest_stays() -> None:
    config, tensors = prune(CONFIG, TENSORS, (1, 4))
    assert config.layers == 2
    for old, new in ((1, 0), (4, 1)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(tensors[name.format(new)], TENSORS[name.format(old)])
    rest = {name for name in TENSORS if ".layers." not in name}
    assert rest == {name for name in tensors if ".layers." not in name}
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in rest)


def test_an_empty_list_keeps_all() -> None:
    config, tensors = prune(CONFIG, TENSORS, ())
    assert config == CONFIG
    assert tensors.keys() == TENSORS.keys()
    assert all(tensors[name] is TENSORS[name] for name in tensors)


@pytest.mark.parametrize("layers", [(5,), (0, 2, 30)])
def test_a_layer_beyond_the_model_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"start.layers names layer {layers[-1]}; the model has 0 to 4"):
        prune(CONFIG, TENSORS, layers)


def test_ten_and_more_layers_are_told_apart() -> None:
    config = small_config(layers=12)
    tensors = {f"model.layers.{layer}.x": torch.tensor(layer) for layer in range(12)}
    assert prune(config, tensors, (1, 11))[1] == {"model.layers.0.x": 1, "model.layers.1.x": 11}


def test_a_fresh_drafter_is_the_same_for_a_seed_and_knows_nothing() -> None:
    first, again, other = (fresh(CONFIG, seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    logits = build(CONFIG, first, torch.float32, "cpu")(TOKENS, TOKENS) @ first["model.embed_tokens.weight"].T
    assert float(logits.detach().std(-1).max()) < 1  # near to uniform


SHAPE = {"layers": 2, "hidden_size": 64, "intermediate_size": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(("table", "reason"), [
    ({"base": "scratch"}, "base = 'scratch' needs shape"),
    ({"shape": SHAPE}, "base = 'scratch' needs shape, and only it takes one"),
    ({"base": "scratch", "shape": SHAPE, "layers": [0]}, "keeps no layers"),
    ({"base": "scratch", "shape": SHAPE | {"kv_heads": 3}}, "multiple of kv_heads"),
    ({"base": "source"}, "base = 'source' needs source"),
    ({"layers": [2, 1]}, "rising order"),
])  # fmt: skip
def test_a_start_that_does_not_fit_together_is_refused(table: dict, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Start.model_validate_json(json.dumps(table))


def test_from_scratch_goes_all_the_way_and_is_declared(tmp_path_factory: pytest.TempPathFactory,
                                                       tmp_path: Path) -> None:
    mill = finished(tmp_path_factory).copy(tmp_path / "scratch")
    shape = ", ".join(f"{name} = {value}" for name, value in SHAPE.items())
    mill.replace("profiles/toy.toml", "layers = [0, 1, 3]", f'base = "scratch"\nshape = {{ {shape} }}')
    mill.run("pack", "--with-upstream")
    told = json.loads((mill.folder("pack") / "architecture.json").read_text())
    assert (told["base_model"], told["base_revision"]) == ("none", "from-scratch")
    assert told["method"].startswith("random weights, distilled")
    assert told["drafter"]["layers"] == 2
