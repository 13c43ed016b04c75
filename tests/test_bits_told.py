"""What is told of bits: the inspector of a packed file, and the tables of a plan."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config, small_decoder
from safetensors.torch import save_file

from drafter import codecs, inspect, weights
from stages.bits import __main__ as plan_bits
from stages.bits.bases import BASES, bits_per_weight, weight_count
from stages.bits.planner import Planner
from stages.bits.steps import log_steps
from stages.profile import Limits, load_profile

ROOT = Path(__file__).resolve().parent.parent
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A packed drafter, and the weights that it was packed from."""
    tensors = {name: one.detach() for name, one in small_decoder(seed=4).named_parameters()}
    packing = Planner(small_config(), 24_000).fit(tensors, log_steps(tensors, {}, 0.0))
    weights.save(tmp_path / "model.safetensors", small_config(), packing.plan, packing.parts)
    save_file(tensors, tmp_path / "plain.safetensors")
    return tmp_path / "model.safetensors", tmp_path / "plain.safetensors"


def test_a_row_says_what_is_stored(files: tuple[Path, Path]) -> None:
    rows = {row.name: row for row in inspect.inspect(*files)}
    _, loaded = weights.load(files[0])
    assert rows.keys() == loaded.keys()
    row, decoded = rows[NAME], loaded[NAME]
    plain = {name: one.detach() for name, one in small_decoder(seed=4).named_parameters()}[NAME]
    assert row.zeros_share == pytest.approx(float((decoded == 0).float().mean()))
    off = (decoded - plain).square().sum() / plain.square().sum()
    assert row.error_db == pytest.approx(10 * np.log10(float(off)), abs=1e-3)
    assert row.bits_per_weight == pytest.approx(row.size_bytes * 8 / decoded.numel())
    least, median, largest = row.steps
    levels = [row_.unique().diff().min() for row_ in decoded if len(row_.unique()) > 2]
    assert least <= median <= largest
    assert least <= float(min(levels)) * 1.01  # the nearest two values of a row are a step apart, or more
    assert sum(one.size_bytes for one in rows.values()) < files[0].stat().st_size
    assert {row.codec for row in rows.values()} == {"entropy", "bf16"}


def test_the_command_prints_a_table_or_lines_of_json(files: tuple[Path, Path], capsys) -> None:
    assert inspect.main([str(files[0].parent), "--against", str(files[1])]) == 0
    said = capsys.readouterr().out
    assert f"{files[0].stat().st_size:,}" in said.splitlines()[-1]
    assert any(line.startswith(NAME) and line.endswith("dB") for line in said.splitlines())
    assert inspect.main([str(files[0]), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["name"] for line in lines} == {line.split()[0] for line in said.splitlines()[1:-1]}


def test_options_over_a_codec_are_told(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    told = {"codec": "nf4", "group": 64, "rank": 2, "zstd": 3, "shape": [64, 64]}
    side = {"left": torch.ones(64, 2), "right": torch.ones(2, 64)}
    parts = weights.encode({"x": weight}, {"x": told}, {"x": side})
    weights.save(tmp_path / "x", small_config(), {"x": told}, parts)
    row, = inspect.inspect(tmp_path / "x")
    assert row.codec == "nf4 g64 rank 2 zstd"
    assert row.steps[2] == codecs.encode(weight, told | {"zstd": 0}, side)[".scales"].max()


@pytest.mark.parametrize("harm", ["missing", "cut", "another shape"])
def test_what_cannot_be_read_is_a_sentence(harm: str, files: tuple[Path, Path], capsys) -> None:
    packed, plain = files
    if harm == "cut":
        packed.write_bytes(packed.read_bytes()[:-9])
    elif harm == "another shape":
        save_file({name: torch.zeros(3) for name in weights.load(packed)[1]}, plain)
    arguments = [str(packed.with_name("no") if harm == "missing" else packed), "--against", str(plain)]
    assert inspect.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("drafter: ") and said.count("\n") == 1


@pytest.mark.parametrize(("base", "layers", "count", "bits"), [
    ("Qwen3-1.7B", 28, 1_720_574_976, 4.64), ("Qwen3-4B", 36, 4_022_468_096, 1.98),
    ("Qwen3-4B", 24, 2_811_298_304, 2.84), ("Qwen3-8B", 36, 8_190_735_360, 0.97),
    ("SmolLM2-135M", 30, 134_515_008, 59.4),
])  # fmt: skip
def test_known_bases_get_known_bits_for_a_billion_bytes(
        base: str, layers: int, count: int, bits: float) -> None:
    kept = BASES[base].with_layers(layers)
    assert weight_count(kept) == count
    assert bits_per_weight(kept, 1_000_000_000) == pytest.approx(bits, rel=0.01)


def test_the_plan_of_a_profile_is_printed_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile("smollm2-small", ROOT / "profiles")
    profile = profile.model_copy(update={"limits": Limits(limit_bytes=24_001, reserve_bytes=1)})
    folder = tmp_path / "build" / "smollm2-small" / "distill"
    folder.mkdir(parents=True)
    tensors = {name: one.detach() for name, one in small_decoder(seed=4).named_parameters()}
    save_file(tensors, folder / "drafter.safetensors", metadata={"config": small_config().to_json()})
    save_file({name: torch.ones(len(one)) for name, one in tensors.items() if one.ndim == 2},
              folder / "sensitivity.safetensors")
    monkeypatch.setattr(plan_bits, "ROOT", tmp_path)
    table = plan_bits.plan_table(profile, 24_000)
    assert table.row_count == sum(one.ndim == 2 for one in tensors.values())
    assert "of the allotment" in table.title


def test_a_profile_without_a_drafter_is_a_sentence(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    profiles = ROOT / "profiles"
    monkeypatch.setattr(plan_bits, "ROOT", tmp_path)
    monkeypatch.setattr(plan_bits, "load_profile", lambda name, _folder: load_profile(name, profiles))
    assert plan_bits.main(["--profile", "smollm2-small"]) == 2
    assert "run `make distill PROFILE=smollm2-small`" in capsys.readouterr().err
