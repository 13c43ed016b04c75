"""QAT in this process: what is packed is what was trained, within its allotment, and it resumes exactly."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config, small_decoder
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainers import as_rows, make_job, own_settings_of_torch  # noqa: F401 (a fixture)

from drafter import codecs, weights
from drafter.model import Decoder
from drafter.replay import Conversation
from stages.bits.planner import Planner, plan_of
from stages.bits.steps import log_steps, to_steps
from stages.bits.views import EntropyView, RoundTripView, fixed_plan, learned_grid
from stages.errors import UserError
from stages.profile import Limits, Qat
from stages.qat import Drafter, Quantiser, read_drafter
from stages.training.rows import Row, Rows
from stages.training.trainer import Trainer

ALLOTMENT = 24_000  # of 74,000 weights: about 2.4 bits
COMMON = {"dtype": "float32", "steps": 10, "batch_tokens": 96, "learning_rate": 1e-2, "warmup_steps": 2,
          "max_row_tokens": 60}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "entropy": {"codec": "entropy"},
    "entropy by rms": {"codec": "entropy", "fisher_exponent": 0.0},
    "entropy, learned steps": {"codec": "entropy", "learn_steps": True},
    "entropy, frozen embedding": {"codec": "entropy", "train_embedding": False},
    "int4 g32": {"codec": "int4", "group": 32},
    "int4 g32 clipped": {"codec": "int4", "group": 32, "clip": True},
    "fp8 untouched": {"codec": "fp8", "steps": 0},
    "bf16 untouched": {"codec": "bf16", "steps": 0},
    "nf4 + int8 + rank + zstd": {"codec": "nf4", "codec_embedding": "int8", "rank": 4, "zstd": 3},
}


@pytest.fixture(scope="module")
def rows() -> Rows:
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(12):
        prompt, continuation = (torch.randint(0, 97, (n,), generator=random) for n in (9, 20))
        ids = torch.stack([continuation, (continuation + 1) % 97], 1)
        made.append(Row(prompt, continuation, ids, torch.tensor([[0.7, 0.3]]).log().expand(20, 2)))
    return as_rows(made)


@pytest.fixture(scope="module")
def dev(rows: Rows) -> list[Conversation]:
    chosen = [rows[i] for i in range(4)]
    return [Conversation(str(i), "math", row.prompt.tolist(), row.continuation.tolist())
            for i, row in enumerate(chosen)]


@pytest.fixture(scope="module")
def start() -> Drafter:
    tensors = {name: one.detach() for name, one in small_decoder(seed=2).named_parameters()}
    random = torch.Generator().manual_seed(1)
    felt = {name: torch.rand(len(one), generator=random) ** 4 * 1e-6
            for name, one in tensors.items() if one.ndim == 2}
    return Drafter(small_config(), tensors, felt)


def settings_of(recipe: str, **changes: Any) -> Qat:
    return Qat(**(COMMON | RECIPES[recipe] | changes))


def quantiser(folder: Path, start: Drafter, recipe: str, allotment: int | None = None,
              **changes: Any) -> Quantiser:
    known = allotment or (ALLOTMENT if recipe.startswith("entropy") else 400_000)
    limits = Limits(limit_bytes=known + 1, reserve_bytes=1)
    return Quantiser(make_job(folder), settings_of(recipe, **changes), limits, start)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_packed_is_what_was_trained(recipe: str, rows: Rows, dev: list[Conversation], start: Drafter,
                                            tmp_path: Path) -> None:
    own = quantiser(tmp_path, start, recipe)
    metrics = own.run(rows, dev, tmp_path / "x.safetensors")
    size = (tmp_path / "x.safetensors").stat().st_size
    assert metrics["packed_bytes"] == size
    assert metrics["packed_equals_trained"] is True
    config, loaded = weights.load(tmp_path / "x.safetensors")
    seen = own.view(own.trainer.finished())
    assert loaded.keys() == seen.keys() == start.weights.keys()
    assert [name for name in seen if not torch.equal(seen[name], loaded[name])] == []
    if recipe.startswith("entropy"):
        assert 0.995 * ALLOTMENT <= size <= ALLOTMENT
    else:
        assert size <= 400_000
    # The simulated tau of what is packed, by a trainer that knows nothing of codecs.
    plain = Trainer(make_job(tmp_path / "plain"), settings_of("bf16 untouched"), config, loaded)
    assert plain.tau(dev).to_json() == metrics["tau_dev_packed"]
    moved = [name for name, one in own.trainer.finished().items()
             if one.ndim == 2 and not torch.equal(one, start.weights[name])]
    frozen = recipe == "entropy, frozen embedding"
    assert len(moved) == (0 if "untouched" in recipe else 15 - frozen)


def test_int4_in_groups_of_128(rows: Rows, dev: list[Conversation], tmp_path: Path) -> None:
    config = replace(small_config(), hidden_size=128, intermediate_size=256, head_dim=32)
    torch.manual_seed(5)
    decoder = Decoder(config)
    tensors = {name: one.detach() for name, one in decoder.named_parameters()}
    limits = Limits(limit_bytes=400_000, reserve_bytes=1)
    settings = settings_of("int4 g32", group=128, clip=True)
    own = Quantiser(make_job(tmp_path), settings, limits, Drafter(config, tensors, {}))
    own.run(rows, dev, tmp_path / "x")
    _, loaded = weights.load(tmp_path / "x")
    told = {"codec": "int4", "group": 128, "clip": True}
    for name, one in own.trainer.finished().items():
        if one.ndim == 2:
            assert torch.equal(loaded[name], codecs.round_trip(one, told | {"shape": list(one.shape)}))


def test_untouched_weights_are_the_codec_of_the_start(rows: Rows, dev: list[Conversation], start: Drafter,
                                                      tmp_path: Path) -> None:
    quantiser(tmp_path, start, "fp8 untouched").run(rows, dev, tmp_path / "x")
    for name, one in weights.load(tmp_path / "x")[1].items():
        told = {"codec": "fp8" if one.ndim == 2 else "bf16", "shape": list(one.shape)}
        assert torch.equal(one, codecs.round_trip(start.weights[name], told))


@pytest.mark.parametrize("recipe", ["entropy", "entropy, learned steps", "nf4 + int8 + rank + zstd"])
@pytest.mark.parametrize("stop", [3, 28])  # before and after the grid has moved
def test_a_stop_leaves_no_trace(recipe: str, stop: int, rows: Rows, dev: list[Conversation], start: Drafter,
                                tmp_path: Path) -> None:
    whole = quantiser(tmp_path / "whole", start, recipe, steps=30)
    initial = {name: one.clone() for name, one in whole.view.state().items()}
    expected = whole.run(rows, dev, tmp_path / "whole" / "x")
    assert any(not torch.equal(one, initial[name]) for name, one in whole.view.state().items())
    first = quantiser(tmp_path / "cut", start, recipe, steps=30)
    step = first.trainer._train_step

    def stopping(*batch: Any) -> None:
        if first.trainer.step == stop:
            first.trainer.checkpoints.wait()
            raise InterruptedError
        step(*batch)

    first.trainer._train_step = stopping  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        first.run(rows, dev, tmp_path / "cut" / "x")
    second = quantiser(tmp_path / "cut", start, recipe, steps=30)
    found = second.run(rows, dev, tmp_path / "cut" / "x")
    assert second.trainer.lines == whole.trainer.lines
    assert found == expected
    assert (tmp_path / "cut" / "x").read_bytes() == (tmp_path / "whole" / "x").read_bytes()


def test_the_grid_moves_once_near_the_end_and_the_log_tells_the_rate(
        rows: Rows, dev: list[Conversation], start: Drafter, tmp_path: Path) -> None:
    own = quantiser(tmp_path, start, "entropy")
    grids: list[Tensor] = []
    name = "model.layers.0.mlp.up_proj.weight"
    begin = own.view.begin

    def watched(step: int, steps: int, masters: dict[str, Tensor]) -> dict[str, float]:
        grids.append(own.view.state()[name].clone())
        return begin(step, steps, masters)

    own.view.begin = watched  # type: ignore[method-assign]
    own.run(rows, dev, tmp_path / "x")
    lines = {line["step"]: line for line in own.trainer.lines if "rate" in line}
    assert all(torch.equal(grid, grids[0]) for grid in grids)  # before its tenth step began
    assert {step for step, line in lines.items() if "packed_bytes" in line} == {10}
    assert 0.995 * ALLOTMENT <= lines[10]["packed_bytes"] <= ALLOTMENT
    assert 1.2 < lines[1]["bits_per_weight"] < 2  # header and norms are not among them


def test_a_fixed_grid_passes_gradients_on_as_they_are(start: Drafter) -> None:
    masters = {name: one.clone().requires_grad_() for name, one in start.weights.items()}
    logs = log_steps(start.weights, start.sensitivities, 1.0)
    view = EntropyView(Planner(start.config, ALLOTMENT), start.weights, logs, learned=False)
    seen = view(masters)
    for name, one in seen.items():
        slope = torch.randn(one.shape)
        one.backward(slope)
        assert torch.equal(masters[name].grad, slope)
        if one.ndim == 2:
            steps = to_steps(view.state()[name]).float()[:, None]
            codes = one.detach() / steps
            torch.testing.assert_close(codes, codes.round(), rtol=1e-5, atol=1e-5)
            assert bool(((one - start.weights[name]).abs() <= 0.5001 * steps).all())


def test_a_learned_step_feels_code_less_scaled_weight() -> None:
    """Against the chain rule written out; the mean of the moves is held."""
    torch.manual_seed(3)
    master, logs = torch.randn(6, 40, requires_grad=True), torch.randn(6) * 0.2 - 1
    moves = (0.3 * torch.randn(6)).requires_grad_()
    slope = torch.randn(6, 40)
    learned_grid(master, logs, moves).backward(slope)
    log = logs + (moves - moves.mean()).detach()
    steps = to_steps(log).float()[:, None]
    error = (master.detach() / steps).round() - master.detach() / steps
    by_log = (slope * error).sum(1) * log.exp2() * torch.log(torch.tensor(2.0))
    torch.testing.assert_close(moves.grad, by_log - by_log.mean(), rtol=1e-3, atol=1e-4)
    assert torch.equal(master.grad, slope)


def test_a_correction_is_found_again_near_the_end(start: Drafter) -> None:
    view = RoundTripView(fixed_plan(start.weights, settings_of("nf4 + int8 + rank + zstd")), start.weights)
    before = {path: one.clone() for path, one in view.state().items()}
    moved = {name: 1.3 * one + 0.1 * one.roll(1, 0) for name, one in start.weights.items()}
    view.begin(5, 10, moved)
    assert all(torch.equal(one, before[path]) for path, one in view.state().items())
    view.begin(9, 10, moved)
    assert not any(torch.equal(one, before[path]) for path, one in view.state().items())


@pytest.mark.parametrize(("recipe", "allotment", "said"), [
    ("entropy", 4_000, "norms, steps and header alone take about"),
    ("entropy", 400_000, "is over 9 bits a weight"),
    ("int4 g32", 40_000, "bytes packed by int4, over the allotment of 40000"),
    ("fp8 untouched", 70_000, "bytes packed by fp8, over the allotment of 70000"),
])  # fmt: skip
def test_an_allotment_that_cannot_be_met_is_a_sentence_before_training(
        recipe: str, allotment: int, said: str, start: Drafter, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        quantiser(tmp_path, start, recipe, allotment)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_group_that_does_not_divide_is_a_sentence_with_the_tensor(
        rank: int, start: Drafter, tmp_path: Path) -> None:
    settings = settings_of("nf4 + int8 + rank + zstd", group=64, rank=rank)
    with pytest.raises(UserError, match=r"tensor model.layers.0.mlp.down_proj.weight: 96 columns do not"):
        Quantiser(make_job(tmp_path), settings, Limits(limit_bytes=400_000, reserve_bytes=1), start)


@pytest.mark.parametrize("recipe", ["entropy", "int4 g32"])
def test_a_weight_that_is_not_finite_is_never_packed(
        recipe: str, rows: Rows, dev: list[Conversation], start: Drafter, tmp_path: Path) -> None:
    own = quantiser(tmp_path, start, recipe)
    name = "model.layers.1.mlp.up_proj.weight"
    finished = own.trainer.finished
    broken = {name: start.weights[name].clone()}
    broken[name][7, 3] = float("nan")
    own.trainer.train = lambda *_: {"tau_dev": {}}  # type: ignore[method-assign]
    own.trainer.finished = lambda: finished() | broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match=f"tensor {name}, row 7: not a finite number"):
        own.run(rows, dev, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("share", [0.2, 0.3, 0.6, 0.9])
def test_any_allotment_in_between_is_spent(share: float, start: Drafter) -> None:
    allotment = int(share * sum(one.numel() for one in start.weights.values()))
    logs = log_steps(start.weights, start.sensitivities, 1.0)
    packing = Planner(start.config, allotment).fit(start.weights, logs)
    assert 0.995 * allotment <= packing.size_bytes <= allotment
    assert packing.size_bytes == weights.size(start.config, plan_of(start.weights), packing.parts)


def test_steps_follow_row_fisher(start: Drafter) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    felt, weight = start.sensitivities[name].double(), start.weights[name].double()
    for exponent in (0.0, 0.5, 1.0):
        logs = log_steps(start.weights, start.sensitivities, exponent)[name].double()
        rms = weight.square().mean(1).sqrt()
        expected = rms ** (1 - exponent) * (felt + 0.1 * felt.mean()) ** (-exponent / 2)
        torch.testing.assert_close(logs.exp2(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("harm", ["missing", "short", "nan"])
def test_sensitivities_that_are_none_are_a_sentence(harm: str, start: Drafter) -> None:
    felt = dict(start.sensitivities)
    name = "model.embed_tokens.weight"
    felt |= {"short": {name: felt[name][:-1]}, "nan": {name: felt[name] * float("nan")}}.get(harm, {})
    if harm == "missing":
        felt.pop(name)
    with pytest.raises(UserError, match=f"{name}.*make distill"):
        log_steps(start.weights, felt, 1.0)


def test_rows_of_zeros_and_rows_nobody_felt_have_steps(start: Drafter) -> None:
    tensors = {name: one.clone() for name, one in start.weights.items()}
    tensors["model.embed_tokens.weight"][5:9] = 0
    felt = {name: torch.zeros_like(one) for name, one in start.sensitivities.items()}
    for exponent in (0.0, 0.5, 1.0):
        packing = Planner(start.config, ALLOTMENT).fit(tensors, log_steps(tensors, felt, exponent))
        for name, part in packing.parts.items():
            assert not name.endswith(".steps") or bool(torch.isfinite(part).all())


def test_a_profile_says_which_keys_belong_to_which_codec() -> None:
    for wrong in ({"codec": "entropy", "rank": 2}, {"codec": "entropy", "zstd": 2},
                  {"codec": "int4", "learn_steps": True}, {"codec": "nf4", "fisher_exponent": 0.5}):
        with pytest.raises(ValueError, match="codec 'entropy'"):
            Qat(**(COMMON | wrong))


def test_a_drafter_is_read_as_distill_leaves_it(start: Drafter, tmp_path: Path) -> None:
    save_file(start.weights, tmp_path / "drafter.safetensors", metadata={"config": start.config.to_json()})
    save_file(start.sensitivities, tmp_path / "sensitivity.safetensors")
    found = read_drafter(tmp_path)
    assert found.config == start.config
    assert found.weights.keys() == load_file(tmp_path / "drafter.safetensors").keys()
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("recipe", ["entropy", "int4 g32", "nf4 + int8 + rank + zstd"])
def test_a_start_that_is_not_finite_is_a_sentence(recipe: str, start: Drafter, tmp_path: Path) -> None:
    broken = {name: one.clone() for name, one in start.weights.items()}
    broken["model.layers.0.mlp.up_proj.weight"][3, 1] = float("nan")
    with pytest.raises(UserError, match=r"tensor model.layers.0.mlp.up_proj.weight, row 3: not a finite"):
        quantiser(tmp_path, replace(start, weights=broken), recipe)
