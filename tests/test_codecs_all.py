"""Every codec: against references, over awkward matrices, to the byte, and refusing what is damaged."""

import json
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes.functional as reference
import numpy as np
import pytest
import torch
from conftest import small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy._core import _multiarray_umath  # a library that is not zstd
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter import codecs, tensorfile, weights
from drafter.codecs import entropy, lowrank, zstd
from drafter.codecs.rows import inverse

LARGEST = 3.3895313892515355e38
CODECS: dict[str, dict[str, Any]] = {
    "entropy": {"codec": "entropy"},
    "int4": {"codec": "int4", "group": 32},
    "int4 g128": {"codec": "int4", "group": 128},
    "int4 clipped": {"codec": "int4", "group": 64, "clip": True},
    "int8": {"codec": "int8"},
    "fp8": {"codec": "fp8"},
    "nf4": {"codec": "nf4", "group": 64},
    "bf16": {"codec": "bf16"},
    "nf4 + rank + zstd": {"codec": "nf4", "group": 32, "rank": 3, "zstd": 3},
    "fp8 + zstd": {"codec": "fp8", "zstd": 9},
    "entropy + zstd": {"codec": "entropy", "zstd": 1},
    "int8 + rank": {"codec": "int8", "rank": 2},
}
NAME = "model.layers.0.mlp.up_proj.weight"
awkward = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1e-8, 1.0, -1.0, 6e4, -6e4, 1e38, LARGEST])
values = st.sampled_from([awkward, st.floats(-3, 3, width=32), awkward | st.floats(-3, 3, width=32)])


def entry(kind: str, weight: Tensor) -> dict[str, Any]:
    return CODECS[kind] | {"shape": list(weight.shape)}


def side(weight: Tensor, rank: int = 0, bits: float = 2.0) -> dict[str, Tensor]:
    """Steps as a planner might give them, and factors of the weight itself."""
    rms = weight.double().square().mean(1).sqrt()
    planned = {"steps": (rms * 2 ** (2.05 - bits)).clamp(0, 1e38).float()}
    if rank:
        torch.manual_seed(0)
        columns, rows = torch.randn(rank, weight.shape[1]), torch.randn(len(weight), rank)
        planned |= {"left": rows.bfloat16(), "right": (0.01 * columns).bfloat16()}
    return planned


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    shape = draw(st.integers(1, 5)), 128 * draw(st.integers(1, 3))
    found = draw(arrays.arrays(np.float32, shape, elements=draw(values), fill=draw(values)))
    found[draw(st.integers(0, shape[0] - 1))] = draw(st.sampled_from([0.0, 1e-8, 1.0]))
    return torch.from_numpy(found).clamp(-1e38, 1e38)  # a multiple of the step is nearby and finite


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=40)
@given(weight=matrices())
def test_what_is_decoded_is_finite_repeats_and_keeps_rows_of_zeros(kind: str, weight: Tensor) -> None:
    told, planned = entry(kind, weight), side(weight, CODECS[kind].get("rank", 0))
    parts = codecs.encode(weight, told, planned)
    decoded = codecs.decode(parts, told)
    assert decoded.shape == weight.shape
    assert decoded.dtype == torch.float32
    assert bool(torch.isfinite(decoded).all())
    again = codecs.encode(weight, told, planned)
    assert all(torch.equal(again[suffix], part) for suffix, part in parts.items())
    if "rank" not in told:
        assert not decoded[weight.abs().amax(1) == 0].any()
    if (size := codecs.size(told)) is not None:
        assert size == sum(part.nbytes for part in parts.values())


@settings(max_examples=100)
@given(weight=matrices(), bits=st.floats(-3, 12))
def test_entropy_is_the_nearest_multiple_of_the_rows_step(weight: Tensor, bits: float) -> None:
    planned = side(weight, bits=bits)
    told = {"codec": "entropy", "shape": list(weight.shape)}
    parts = codecs.encode(weight, told, planned)
    steps = parts[".steps"].float().numpy().astype(np.float64)[:, None]
    scaled = weight.numpy() * inverse(parts[".steps"]).numpy()[:, None]
    codes = np.clip(np.rint(scaled), -entropy.LARGEST_CODE, entropy.LARGEST_CODE).astype(np.float64)
    np.testing.assert_array_equal(codecs.decode(parts, told).numpy(), (codes * steps).astype(np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1), (1, 3_000_001), (70_000, 3), (257, 4099)])
@pytest.mark.parametrize("bits", [0.2, 1.5, 3.0, 6.0, 11.0])
def test_entropy_takes_any_shape_and_rate(shape: tuple[int, int], bits: float) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0, shape[1] // 2] = 4e4  # an escape of an escape: beyond every digit
    told, steps = {"codec": "entropy", "shape": list(shape)}, torch.full(shape[:1], 2 ** (2.05 - bits))
    decoded = codecs.round_trip(weight, told, {"steps": steps})
    codes = (weight / steps.bfloat16().float()[:, None]).round().clamp(-32767, 32767)
    torch.testing.assert_close(decoded, codes * steps.bfloat16().float()[:, None], rtol=1e-6, atol=0)


def step_at(weight: torch.Tensor, rate: float) -> tuple[float, float]:
    """Find the step at which the codes' entropy is nearest to a rate, and that entropy, in bits."""
    low, high, ideal = 0.01, 10.0, 0.0
    for _ in range(40):
        step = (low * high) ** 0.5
        counts = np.unique((weight / step).round().numpy(), return_counts=True)[1] / weight.numel()
        ideal = float(-(counts * np.log2(counts)).sum())
        low, high = (step, high) if ideal > rate else (low, step)
    return step, ideal


@pytest.mark.parametrize("rate", [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0])
def test_entropy_is_within_three_hundredths_of_the_ideal(rate: float) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(2))
    step, ideal = step_at(weight, rate)
    steps = torch.full((1024,), step)
    parts = codecs.encode(weight, {"codec": "entropy", "shape": [1024, 1024]}, {"steps": steps})
    real = parts[".codes"].nbytes * 8 / weight.numel()
    assert ideal == pytest.approx(rate, abs=0.01)
    assert 1.0 <= real / ideal <= 1.03


@pytest.mark.parametrize("rate", [1.0, 1.25, 1.5])
def test_entropy_is_as_near_on_rows_with_heavy_tails(rate: float) -> None:
    """Trained rows are not quite normal: more escapes, and rows of several scales."""
    random = torch.Generator().manual_seed(3)
    uniform = torch.rand(1024, 1024, generator=random) - 0.5
    weight = -uniform.sign() * torch.log1p(-2 * uniform.abs() * (1 - 1e-7))
    step, ideal = step_at(weight, rate)
    parts = codecs.encode(weight, {"codec": "entropy", "shape": [1024, 1024]},
                          {"steps": torch.full((1024,), step)})
    assert 1.0 <= parts[".codes"].nbytes * 8 / weight.numel() / ideal <= 1.03


def test_estimates_leave_the_codes_as_they_are() -> None:
    codes = torch.arange(-8.0, 8.0).reshape(2, 8)
    before = codes.clone()
    entropy.code_bits(codes)
    assert torch.equal(codes, before)


@settings(max_examples=100)
@given(weight=matrices(), group=st.sampled_from([32, 64, 128]))
def test_nf4_is_bitsandbytes_bit_for_bit(weight: Tensor, group: int) -> None:
    weight = torch.where(weight.abs() < 2.0**-126, 0, weight)  # there 1 / largest is infinite, and theirs NaN
    told = {"codec": "nf4", "group": group, "shape": list(weight.shape)}
    parts = codecs.encode(weight, told)
    codes, state = reference.quantize_4bit(weight, blocksize=group, quant_type="nf4")
    assert torch.equal(parts[".codes"].flatten(), codes.flatten())
    assert torch.equal(parts[".scales"].flatten(), state.absmax)
    assert torch.equal(codecs.decode(parts, told), reference.dequantize_4bit(codes, state))


@settings(max_examples=100)
@given(weight=matrices())
def test_fp8_is_torchs_float8_of_the_scaled_tensor(weight: Tensor) -> None:
    largest = weight.abs().max()
    told = {"codec": "fp8", "shape": list(weight.shape)}
    decoded = codecs.round_trip(weight, told)
    if largest > 2.0**-116:
        scale = largest / 448
        assert torch.equal(decoded, (weight / scale).to(torch.float8_e4m3fn).float() * scale)
    else:
        assert not decoded.any()


@settings(max_examples=100)
@given(weight=matrices())
def test_int8_is_off_by_half_a_step_of_its_row(weight: Tensor) -> None:
    told = {"codec": "int8", "shape": list(weight.shape)}
    parts = codecs.encode(weight, told)
    steps = parts[".steps"].double()[:, None]
    error = (codecs.decode(parts, told).double() - weight.double()).abs()
    # bfloat16 may round a step down by 2**-9, which cuts half a step more off code 127.
    assert bool((error <= steps * 0.78 + 127 * 2.0**-126).all())


@settings(max_examples=60)
@given(weight=matrices())
def test_int4_clipping_never_makes_a_group_worse(weight: Tensor) -> None:
    weight = weight.clamp(-1e15, 1e15)  # squares stay finite
    told = {"codec": "int4", "group": 32, "shape": list(weight.shape)}

    def errors(settings_: dict[str, Any]) -> Tensor:
        off = (codecs.round_trip(weight, settings_) - weight).square()
        return off.reshape(len(weight), -1, 32).sum(-1)

    assert bool((errors(told | {"clip": True}) <= errors(told)).all())


def test_int4_clipping_gains_on_normal_weights() -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    told = {"codec": "int4", "group": 128, "shape": [256, 512]}
    plain, clipped = (float((codecs.round_trip(weight, one) - weight).square().mean())
                      for one in (told, told | {"clip": True}))  # fmt: skip
    assert clipped < 0.95 * plain


def test_a_correction_is_added_to_what_the_codec_makes_of_the_rest() -> None:
    torch.manual_seed(4)
    weight = torch.randn(96, 128) + torch.randn(96, 2) @ torch.randn(2, 128)
    told = {"codec": "nf4", "group": 64, "shape": [96, 128]}
    planned = lowrank.factors(weight - codecs.round_trip(weight, told), 8)
    product = planned["left"].double() @ planned["right"].double()
    expected = codecs.round_trip(weight - product.float(), told).double() + product
    corrected = codecs.round_trip(weight, told | {"rank": 8}, planned)
    assert torch.equal(corrected, expected.float())
    before, after = (float((one - weight).square().sum())
                     for one in (codecs.round_trip(weight, told), corrected))
    assert after < 0.9 * before


def test_a_binding_that_shows_no_libzstd_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "import_module", lambda _: _multiarray_umath)
    with pytest.raises(ImportError, match="does not show libzstd's calls"):
        zstd._library.__wrapped__()


def packed(folder: Path, kind: str) -> Path:
    """A file of one matrix and a norm."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    told = entry(kind, weight)
    plan = {NAME: told, "model.norm.weight": {"codec": "bf16", "shape": [128]}}
    sides = {NAME: side(weight, told.get("rank", 0))}
    parts = weights.encode({NAME: weight, "model.norm.weight": torch.ones(128)}, plan, sides)
    weights.save(folder / "x.safetensors", small_config(), plan, parts)
    assert (folder / "x.safetensors").stat().st_size == weights.size(small_config(), plan, parts)
    _, loaded = weights.load(folder / "x.safetensors")
    assert torch.equal(loaded[NAME], codecs.round_trip(weight, told, sides[NAME]))
    _, short = weights.load(folder / "x.safetensors", dtype=torch.bfloat16)
    assert torch.equal(short[NAME], loaded[NAME].bfloat16())
    return folder / "x.safetensors"


@pytest.mark.parametrize("kind", CODECS)
def test_one_flipped_bit_anywhere_is_refused_with_the_tensors_name(kind: str, tmp_path: Path) -> None:
    path = packed(tmp_path, kind)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(6)
    for place in random.choice(np.arange(header, len(whole)), 40, replace=False):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"sum is wrong in block 0 of 1|does not decode as") as caught:
            weights.load(path)
        assert str(path) in str(caught.value)
        assert NAME in str(caught.value) or "model.norm.weight" in str(caught.value)


def test_the_block_of_a_flipped_bit_is_named(tmp_path: Path) -> None:
    weight = torch.randn(3000, 1024, generator=torch.Generator().manual_seed(7))
    plan = {NAME: {"codec": "int8", "shape": [3000, 1024]}, "y": {"codec": "bf16", "shape": [9_000_000]}}
    parts = weights.encode({NAME: weight, "y": torch.zeros(9_000_000)}, plan)
    weights.save(tmp_path / "x", small_config(), plan, parts)
    content = bytearray((tmp_path / "x").read_bytes())
    # The widest types come first: y's 18,000,000 bytes, in five blocks.
    content[-parts[f"{NAME}.codes"].nbytes - 3000 * 2 - 10] ^= 1
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="tensor y is damaged: its sum is wrong in block 4 of 5"):
        weights.load(tmp_path / "x")


@pytest.mark.parametrize("harm", ["second frame", "cut", "rubbish", "claims 2 TB", "empty"])
def test_zstd_frames_that_are_not_one_whole_frame(harm: str) -> None:
    """Sums apart: the decoder knows each length, takes exactly that, and takes no memory on a claim."""
    weight = torch.randn(64, 128)
    told = {"codec": "int8", "shape": [64, 128], "zstd": 3}
    parts = codecs.encode(weight, told)
    frame = bytes(zstd.to_bytes(parts[".codes.zst"]))
    claim = (0xFD2FB528).to_bytes(4, "little") + b"\xe0" + (2 << 40).to_bytes(8, "little") + frame[9:]
    harmed = {"second frame": frame + frame, "cut": frame[:-200], "rubbish": frame + b"abcd",
              "claims 2 TB": claim, "empty": b""}[harm]  # fmt: skip
    parts[".codes.zst"] = zstd.from_bytes(harmed)
    with pytest.raises(ValueError, match="zstd frame"):
        codecs.decode(parts, told)


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_run_of_sections_is_refused_or_decodes_to_its_shape(data: st.DataObject) -> None:
    """Sums apart: whatever bytes stand there, nothing but ValueError comes of it, and no wrong shape."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(8))
    told = {"codec": "entropy", "shape": [40, 64]}
    parts = codecs.encode(weight, told, side(weight))
    content = bytearray(zstd.to_bytes(parts[".codes"]))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for place in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=4)):
        if content:
            content[place] ^= data.draw(st.integers(1, 255))
    try:
        found = codecs.decode(parts | {".codes": zstd.from_bytes(bytes(content))}, told)
    except ValueError:
        return
    assert found.shape == weight.shape


@pytest.mark.parametrize("steps", [[1.0, float("nan")], [1.0, float("inf")], [1.0, -1.0]])
def test_steps_that_are_no_steps_are_refused(steps: list[float]) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        codecs.encode(torch.ones(2, 8), {"codec": "entropy", "shape": [2, 8]}, {"steps": torch.tensor(steps)})


def test_what_would_round_to_infinity_is_refused_with_its_row() -> None:
    weight = torch.tensor([[1.0, 1.0], [LARGEST, 0.0]])
    told = {"codec": "entropy", "shape": [2, 2]}
    with pytest.raises(ValueError, match="row 1: rounds to what is not finite"):
        codecs.encode(weight, told, {"steps": torch.tensor([1.0, LARGEST / 1.6])})


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_tensor_and_row(kind: str, value: float) -> None:
    weight = torch.ones(4, 128)
    told, planned = {NAME: entry(kind, weight)}, {NAME: side(weight, CODECS[kind].get("rank", 0))}
    weight[2, 7] = value
    with pytest.raises(ValueError, match=f"{NAME}, row 2: not a finite number"):
        weights.encode({NAME: weight}, told, planned)


def test_a_stored_step_that_is_not_finite_is_refused_with_tensor_and_row(tmp_path: Path) -> None:
    path = packed(tmp_path, "entropy")
    parts = load_file(path)
    parts[f"{NAME}.steps"][9] = float("nan")
    plan = {NAME: {"codec": "entropy", "shape": [64, 128]}, "model.norm.weight": {"codec": "bf16",
                                                                                 "shape": [128]}}  # fmt: skip
    weights.save(path, small_config(), plan, parts)
    with pytest.raises(ValueError, match=f"tensor {NAME} does not decode as entropy: row 9"):
        weights.load(path)


def test_a_false_shape_takes_no_memory(tmp_path: Path) -> None:
    path = packed(tmp_path, "entropy")
    parts = load_file(path)
    plan = {NAME: {"codec": "entropy", "shape": [64, 1 << 40]},
            "model.norm.weight": {"codec": "bf16", "shape": [128]}}  # fmt: skip
    weights.save(path, small_config(), plan, parts)
    with pytest.raises(ValueError, match=NAME):
        weights.load(path)


@settings(max_examples=60)
@given(st.dictionaries(st.text("abc.é", min_size=1, max_size=9),
                       st.sampled_from([(3,), (2, 5), (0,), (7, 1)]), max_size=6), st.data())  # fmt: skip
def test_a_tensor_file_is_what_the_library_reads_and_as_long_as_said(
        shapes: dict, data: st.DataObject) -> None:
    kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
    tensors = {name: torch.zeros(shape, dtype=data.draw(kinds)) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        tensorfile.save(tensors, path, {"plan": json.dumps({"é": "\n"})})
        assert path.stat().st_size == tensorfile.size(tensors, {"plan": json.dumps({"é": "\n"})})
        loaded = load_file(path)
        assert loaded.keys() == tensors.keys()
        assert all(loaded[name].shape == one.shape and loaded[name].dtype == one.dtype
                   for name, one in tensors.items())
        save_file(tensors, path)
