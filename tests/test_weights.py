"""Packed weights: what is saved is what is loaded, and a damaged file is a sentence with its name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import small_config, small_decoder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter import weights
from drafter.codecs import round_trip
from drafter.model import EMBEDDING, build
from stages.bits.views import RoundTripView, fixed_plan
from stages.profile import Qat

NORM, MATRIX = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 18432\n" % (b"4d" * 32)


def packed_inputs() -> tuple[dict[str, torch.Tensor], weights.Plan]:
    tensors = small_decoder("qwen3", seed=51).state_dict()
    plan: weights.Plan = {}
    for name, tensor in tensors.items():
        plan[name] = {"codec": "bf16", "shape": list(tensor.shape)}
        if tensor.ndim == 2:
            plan[name] |= {"codec": "int4", "group": 32}
    return tensors, plan


TENSORS, PLAN = packed_inputs()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    weights.save(path, small_config("qwen3"), PLAN, weights.encode(TENSORS, PLAN))
    return path


def refused(path: Path, *words: str) -> str:
    """Load a file that must not load; the message has its name and these words."""
    with pytest.raises(ValueError) as caught:
        weights.load(path)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message
    assert "\n" not in message
    return message


def test_a_host_without_memory_is_no_damage(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(weights, "empty", none_left)
    with pytest.raises(MemoryError, match=r"tensor \S+: .*can't allocate memory"):
        weights.load(packed)


@pytest.mark.parametrize("name", ["config", "plan", "sums"])
def test_a_header_nested_too_deeply_is_refused(packed: Path, name: str) -> None:
    with safe_open(packed, framework="pt") as stored:
        fields = dict(stored.metadata())
    save_file(load_file(packed), packed, fields | {name: 100_000 * "[" + 100_000 * "]"})
    refused(packed, "its header is not a packed drafter's")


def test_what_is_loaded_is_the_codecs_round_trip_bit_for_bit(packed: Path) -> None:
    config, loaded = weights.load(packed)
    assert config == small_config("qwen3")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, round_trip(TENSORS[name], PLAN[name]))
    assert build(config, loaded, torch.float32, "cpu").config == config


def test_training_sees_what_is_loaded_and_passes_gradients_through(packed: Path) -> None:
    masters = {name: tensor.clone().requires_grad_() for name, tensor in TENSORS.items()}
    settings = Qat(codec="int4", dtype="float32", steps=0, batch_tokens=512, learning_rate=0.1)
    assert fixed_plan(masters, settings) == PLAN
    seen = RoundTripView(PLAN, TENSORS)(masters)
    loaded = weights.load(packed)[1]
    for name, tensor in seen.items():
        assert torch.equal(tensor, loaded[name])
        slope = torch.randn_like(tensor)
        tensor.backward(slope)
        assert torch.equal(masters[name].grad, slope)
    assert not torch.equal(seen[MATRIX], TENSORS[MATRIX])


def test_packing_what_was_loaded_gives_the_same_file(packed: Path, tmp_path: Path) -> None:
    config, loaded = weights.load(packed)
    weights.save(tmp_path / "again", config, PLAN, weights.encode(loaded, PLAN))
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()


def test_the_same_input_gives_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    turned = dict(reversed(TENSORS.items())), dict(reversed(PLAN.items()))
    weights.save(tmp_path / "again", small_config("qwen3"), turned[1], weights.encode(*turned))
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()


def test_stored_under_the_tensors_name_and_the_codecs_suffix(packed: Path) -> None:
    stored = load_file(packed)
    assert stored[f"{MATRIX}.codes"].dtype == torch.uint8
    assert stored[f"{MATRIX}.scales"].dtype == stored[NORM].dtype == torch.bfloat16
    matrices = [tensor for tensor in TENSORS.values() if tensor.ndim == 2]
    size = sum(tensor.numel() * 9 // 16 for tensor in matrices)
    assert sum(t.nbytes for name, t in stored.items() if name.endswith((".codes", ".scales"))) == size


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "at"), [(MATRIX, (5, 7)), (NORM, (9,))])
def test_what_is_not_finite_is_never_packed(value: float, name: str, at: tuple[int, ...]) -> None:
    broken = TENSORS | {name: TENSORS[name].clone()}
    broken[name][at] = value
    with pytest.raises(ValueError, match=f"{name}, row {at[0]}: not a finite number"):
        weights.encode(broken, PLAN)


@pytest.mark.parametrize("name", [MATRIX, NORM])
def test_what_a_codec_would_make_infinite_is_never_packed(name: str) -> None:
    broken = TENSORS | {name: TENSORS[name].clone()}
    broken[name][3] = torch.finfo(torch.float32).max
    with pytest.raises(ValueError, match=f"{name}, row 3: not a finite number"):
        weights.encode(broken, PLAN)


@pytest.mark.parametrize("change", [{"group": 33}, {"codec": "int9"}])
def test_a_plan_that_does_not_suit_names_the_tensor(change: dict) -> None:
    with pytest.raises(ValueError, match=MATRIX):
        weights.encode(TENSORS, PLAN | {MATRIX: PLAN[MATRIX] | change})


def header(path: Path) -> tuple[bytes, bytes]:
    """The bytes of the header's JSON, and those of the data."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]


def with_header(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def overlapping(path: Path) -> bytes:
    text, data = header(path)
    fields = json.loads(text)
    fields[NORM]["data_offsets"] = [0, 128]
    return with_header(json.dumps(fields).encode(), data)


DAMAGE: dict[str, Callable[[Path], bytes]] = {
    "last byte off": lambda path: path.read_bytes()[:-1],
    "half": lambda path: path.read_bytes()[: path.stat().st_size // 2],
    "one byte more": lambda path: path.read_bytes() + b"\0",
    "header of 2**40 bytes": lambda path: (2**40).to_bytes(8, "little") + path.read_bytes()[8:],
    "header cut": lambda path: with_header(header(path)[0][:-40], header(path)[1]),
    "file ends in its header": lambda path: path.read_bytes()[:100],
    "header no JSON": lambda path: with_header(b"\xff" * 64, header(path)[1]),
    "offsets overlap": overlapping,
    "empty": lambda path: b"",
    "seven bytes": lambda path: b"\0" * 7,
    "pointer": lambda path: POINTER,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_by_name_and_size(packed: Path, kind: str) -> None:
    packed.write_bytes(DAMAGE[kind](packed))
    refused(packed, "not a whole safetensors file", f"{packed.stat().st_size} bytes")


def test_no_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path / "missing.safetensors")
    refused(tmp_path)


def rewrite(path: Path, parts: dict[str, torch.Tensor] | None = None, **metadata: str | None) -> None:
    """Store the file again with some parts (None: dropped) or header fields changed."""
    with safe_open(path, framework="pt") as stored:
        fields = stored.metadata() | metadata
    kept = {name: part for name, part in (load_file(path) | (parts or {})).items() if part is not None}
    if fields.get("sums"):  # what is stored is as its writer meant it
        fields["sums"] = json.dumps({name: weights.sums_of(part) for name, part in kept.items()})
    save_file(kept, path, metadata={name: text for name, text in fields.items() if text is not None})


def replan(path: Path, name: str, **change: object) -> None:
    rewrite(path, plan=json.dumps(PLAN | {name: PLAN[name] | change}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": "int5"}, "no codec 'int5'"),
        ({"codec": "bf16"}, "bf16"),
        ({"codec": ["int4"]}, "no codec"),
        ({"group": 16}, "shape"),
        ({"group": 0}, ""),
        ({"group": "32"}, ""),
        ({"shape": [64, 64]}, "shape"),
        ({"shape": [96, 64]}, "shape"),
        ({"shape": [64]}, ""),
        ({"shape": "64"}, ""),
        ({"shape": None}, ""),
        ({"shape": [], "codec": "entropy"}, ""),
    ],
)
def test_a_plan_that_does_not_fit_what_is_stored(packed: Path, change: dict, said: str) -> None:
    replan(packed, MATRIX, **change)
    refused(packed, MATRIX, said)


@pytest.mark.parametrize("shape", [[65], [1, 64], []])
def test_a_norm_of_another_shape(packed: Path, shape: list[int]) -> None:
    if shape == [1, 64]:
        rewrite(packed, {NORM: torch.ones(63, dtype=torch.bfloat16)})
    else:
        replan(packed, NORM, shape=shape)
    refused(packed, NORM)


@pytest.mark.parametrize("suffix", [".codes", ".scales"])
def test_a_missing_part(packed: Path, suffix: str) -> None:
    rewrite(packed, {MATRIX + suffix: None})
    refused(packed, MATRIX, suffix)


def test_a_missing_tensor(packed: Path) -> None:
    rewrite(packed, {NORM: None})
    refused(packed, NORM)


def test_a_tensor_that_no_plan_names(packed: Path) -> None:
    rewrite(packed, {"lm_head.weight": torch.ones(4)})
    refused(packed, "lm_head.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_stored_number_that_is_not_finite(packed: Path, value: float) -> None:
    scales = load_file(packed)[f"{MATRIX}.scales"]
    scales[11, 2] = value
    rewrite(packed, {f"{MATRIX}.scales": scales})
    refused(packed, MATRIX, "row 11")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_codes_of_another_type(packed: Path, dtype: torch.dtype) -> None:
    codes = load_file(packed)[f"{MATRIX}.codes"]
    rewrite(packed, {f"{MATRIX}.codes": (codes.to(dtype) + 256)})
    refused(packed, MATRIX, ".codes")


@pytest.mark.parametrize(
    "fields",
    [{"plan": None}, {"config": None}, {"plan": "{"}, {"plan": "[]"}, {"plan": "null"}, {"plan": '{"a": 1}'},
     {"plan": '{"a": {"codec": "int4"}}'}, {"config": "{}"}, {"config": "null"}, {"config": "[1]"}],
)  # fmt: skip
def test_a_header_that_is_no_packed_drafters(packed: Path, fields: dict) -> None:
    rewrite(packed, **fields)
    refused(packed, "header")


def test_a_file_without_metadata(tmp_path: Path) -> None:
    save_file({EMBEDDING: torch.ones(2, 2)}, tmp_path / "plain.safetensors")
    refused(tmp_path / "plain.safetensors", "header")
