"""Codecs against formulas written out in numpy, over awkward values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from drafter.codecs import bf16, codec, decode, int4, round_trip

SMALLEST = 2.0**-126  # the smallest normal number of float32 and bfloat16
LARGEST = 3.3895313892515355e38  # of bfloat16
GROUPS = (2, 8, 32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, by its bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def reference(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes -8..7, [rows, columns], and steps, [rows, columns / group], group by group."""
    rows, columns = weight.shape
    codes = np.zeros((rows, columns), dtype=int)
    steps = np.zeros((rows, columns // group), dtype=np.float32)
    for row in range(rows):
        for index in range(columns // group):
            span = slice(index * group, (index + 1) * group)
            values = weight[row, span]
            largest = values.max() if values.max() > -values.min() else values.min()
            step = to_bf16(np.float32(largest) / np.float32(-8))
            if abs(step) >= SMALLEST:
                steps[row, index] = step
                scaled = values * (np.float32(1) / step)
                codes[row, span] = np.clip(np.floor(scaled + np.float32(8.5)) - 8, -8, 7)
    return codes, steps


def unpacked(parts: dict[str, torch.Tensor]) -> np.ndarray:
    packed = parts[".codes"].numpy().astype(int)
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=int)
    codes[:, ::2], codes[:, 1::2] = packed % 16 - 8, packed // 16 - 8
    return codes


def settings_of(weight: np.ndarray, group: int) -> dict:
    return {"codec": "int4", "group": group, "shape": list(weight.shape)}


awkward = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-39, 1e-38, SMALLEST, -SMALLEST, 1e-8, 1.0, -1.0,
                           0.5, 6e4, -6e4, LARGEST, -LARGEST])  # fmt: skip
plain = st.floats(-10, 10, width=32)
ordinary = st.floats(-LARGEST, LARGEST, width=32)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    group = draw(st.sampled_from(GROUPS))
    shape = draw(st.integers(1, 3)), group * draw(st.integers(1, 3))
    values = draw(st.sampled_from([awkward, plain, ordinary, awkward | plain]))
    weight = draw(arrays.arrays(np.float32, shape, elements=values, fill=st.nothing()))
    return weight * np.float32(draw(st.sampled_from([1.0, 1e-8, 1e-36]))), group


@settings(max_examples=300)
@given(matrices())
def test_int4_is_the_formula(case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    parts = int4.encode(torch.from_numpy(weight), settings_of(weight, group))
    codes, steps = reference(weight, group)
    np.testing.assert_array_equal(unpacked(parts), codes)
    np.testing.assert_array_equal(parts[".scales"].float().numpy(), steps)
    decoded = decode(parts, settings_of(weight, group))
    assert decoded.dtype == torch.float32
    np.testing.assert_array_equal(decoded.numpy(), codes * np.repeat(steps, group, axis=1))


@settings(max_examples=300)
@given(matrices())
def test_int4_is_off_by_half_a_step_except_where_it_clips(case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    parts = int4.encode(torch.from_numpy(weight), settings_of(weight, group))
    decoded = decode(parts, settings_of(weight, group)).double().numpy()
    assert np.isfinite(decoded).all()
    step = np.repeat(parts[".scales"].double().numpy(), group, axis=1)
    wide = weight.astype(np.float64)
    # At code 7 values up to 8 steps are cut off; a largest value may lie 2**-8 beyond 8 steps by rounding.
    clipped = unpacked(parts) == 7
    bound = np.where(clipped, 1.04, 0.5001) * np.abs(step)
    assert (np.abs(decoded - wide) <= np.maximum(bound, 8.1 * SMALLEST * (step == 0))).all()
    ends = np.abs(wide.reshape(len(wide), -1, group)).max(-1)
    reached = np.abs(decoded.reshape(len(wide), -1, group)).max(-1)
    np.testing.assert_allclose(reached, ends, rtol=2**-8, atol=8.1 * SMALLEST)


@settings(max_examples=200)
@given(matrices())
def test_int4_is_idempotent(case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    entry = settings_of(weight, group)
    parts = int4.encode(torch.from_numpy(weight), entry)
    again = int4.encode(decode(parts, entry), entry)
    assert torch.equal(again[".codes"], parts[".codes"])
    assert torch.equal(again[".scales"], parts[".scales"])


@pytest.mark.parametrize("clip", [False, True])
@given(matrices())
def test_int4s_shortcut_is_what_decoding_gives(clip: bool, case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    entry = settings_of(weight, group) | {"clip": clip}
    found = int4.round_trip(torch.from_numpy(weight), entry)
    assert torch.equal(found, decode(int4.encode(torch.from_numpy(weight), entry), entry))


@pytest.mark.parametrize("value", [0.0, 1e-8, -1e-8, 1e-38, 1e-40, 6e4])
def test_int4_rows_of_one_value(value: float) -> None:
    weight = torch.full((2, 64), value).bfloat16().float()
    decoded = round_trip(weight, {"codec": "int4", "group": 32, "shape": [2, 64]})
    # All of a group is its largest value, code -8, and comes back exactly; what is too tiny becomes 0.
    assert torch.equal(decoded, weight if abs(value) >= 8 * SMALLEST else torch.zeros_like(weight))


def test_int4_with_one_giant_among_dwarfs() -> None:
    weight = torch.full((1, 64), 1e-6)
    weight[0, 5] = 6e4
    decoded = round_trip(weight, {"codec": "int4", "group": 32, "shape": [1, 64]})
    assert decoded[0, 5] == pytest.approx(6e4, rel=2**-8)
    assert not decoded[0, :5].any()
    torch.testing.assert_close(decoded[0, 32:], weight[0, 32:], rtol=2**-8, atol=0)


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 32, 32), (7, 96, 32), (3, 64, 16)])
def test_int4_takes_the_bytes_it_says(rows: int, columns: int, group: int) -> None:
    parts = int4.encode(torch.randn(rows, columns), {"codec": "int4", "group": group})
    assert parts[".codes"].shape == (rows, columns // 2)
    size = sum(part.numel() * part.element_size() for part in parts.values())
    assert size == rows * columns / 2 + 2 * rows * columns / group


def test_int4_refuses_columns_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="40 columns do not divide into groups of 32"):
        int4.encode(torch.ones(2, 40), {"codec": "int4", "group": 32})


@pytest.mark.parametrize(("name", "shape"), [(".codes", (4, 16)), (".codes", (2, 16)), (".codes", (32, 4)),
                                             (".scales", (4, 1)), (".scales", (1, 2)), (".scales", (2, 4)),
                                             (".scales", (4, 2, 1))])  # fmt: skip
def test_int4_refuses_parts_of_another_shape(name: str, shape: tuple[int, ...]) -> None:
    entry = {"codec": "int4", "group": 32, "shape": [4, 64]}
    parts = int4.encode(torch.randn(4, 64), entry)
    parts[name] = torch.ones(shape, dtype=parts[name].dtype)
    with pytest.raises(ValueError, match=r"expected shape"):
        decode(parts, entry)


@given(arrays.arrays(np.float32, st.integers(1, 9), elements=awkward | plain | ordinary, fill=st.nothing()))
def test_bf16_rounds_to_the_nearest_even(values: np.ndarray) -> None:
    entry = {"codec": "bf16", "shape": list(values.shape)}
    decoded = round_trip(torch.from_numpy(values), entry)
    np.testing.assert_array_equal(decoded.numpy(), to_bf16(values))
    assert torch.equal(round_trip(decoded, entry), decoded)
    assert bf16.encode(decoded, entry)[""].nbytes == 2 * len(values)


@pytest.mark.parametrize("name", ["int5", "", "../int4", "int4.x", "__init__", 4])
def test_an_unknown_codec_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="there is no codec"):
        codec(name)
