"""Models as transformers saves them: whole or in shards, tied or not, and damaged ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import small_config
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from drafter.model import EMBEDDING, HEAD
from stages.errors import UserError
from stages.models.target import load_target, read_model

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tiny(family: str = "llama", tied: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of transformers, of the shape of `small_config`."""
    torch.manual_seed(71)
    config, model = (LlamaConfig, LlamaForCausalLM) if family == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    shape = small_config(family, tied=tied)
    return model(
        config(
            vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
            intermediate_size=shape.intermediate_size, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, rope_theta=shape.rope_theta,
            rms_norm_eps=shape.rms_eps, tie_word_embeddings=tied, initializer_range=0.2,
        )
    ).to(dtype).eval()  # fmt: skip


def save(folder: Path, sharded: bool = False, **kind: object) -> PreTrainedModel:
    model = tiny(**kind)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    assert (folder / INDEX).is_file() == sharded
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_what_transformers_saved_is_read(tmp_path: Path, family: str, tied: bool, sharded: bool) -> None:
    saved = save(tmp_path, sharded, family=family, tied=tied)
    config, tensors = read_model(tmp_path, "hub")
    assert config == small_config(family, tied=tied)
    expected = saved.state_dict()
    assert tensors.keys() == expected.keys() - ({HEAD} if tied else set())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    target = load_target(tmp_path, "hub", "float32", "cpu")
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        logits = target.logits(target(tokens, tokens))
        torch.testing.assert_close(logits, saved(tokens).logits, atol=1e-4, rtol=0)


def test_the_types_of_file_and_compute_are_apart(tmp_path: Path) -> None:
    saved = save(tmp_path, dtype=torch.bfloat16)
    _, tensors = read_model(tmp_path, "hub")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    wide = load_target(tmp_path, "hub", "float32", "cpu")
    assert wide.head_weight.dtype == torch.float32
    assert torch.equal(wide.head_weight, saved.state_dict()[HEAD].float())
    assert load_target(tmp_path, "hub", "bfloat16", "cpu").head_weight.dtype == torch.bfloat16


def change_head(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Store a head made from the embedding beside it, or (None) no head."""
    tensors = load_file(folder / WHOLE)
    head = change(tensors[EMBEDDING])
    kept = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    save_file(kept if head is None else kept | {HEAD: head}, folder / WHOLE)


def test_a_tied_head_that_is_left_out_or_equal_is_one_model(tmp_path: Path) -> None:
    save(tmp_path, tied=True)
    models = []
    for change in (lambda _: None, torch.clone):
        change_head(tmp_path, change)
        models.append(read_model(tmp_path, "hub"))
    assert models[0][0] == models[1][0]
    assert HEAD not in models[1][1]  # so that plan and training count it once
    assert models[0][1].keys() == models[1][1].keys()
    assert load_target(tmp_path, "hub", "float32", "cpu").head_weight.shape == (97, 64)


def test_a_tied_head_that_differs_stops_and_names_both(tmp_path: Path) -> None:
    save(tmp_path, tied=True)
    change_head(tmp_path, lambda embedding: embedding + 1e-3)
    with pytest.raises(UserError, match=f"{tmp_path}.*{HEAD}.*{EMBEDDING}.*differ"):
        read_model(tmp_path, "hub")


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, tied=False)
    change_head(tmp_path, lambda _: None)
    with pytest.raises(UserError, match=f"{tmp_path}.*{HEAD}"):
        read_model(tmp_path, "hub")


@pytest.mark.parametrize("tied", [True, False])
def test_an_index_that_names_a_head_in_a_shard_without_it(tmp_path: Path, tied: bool) -> None:
    save(tmp_path, sharded=True, tied=tied)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"].setdefault(HEAD, index["weight_map"][EMBEDDING])
    (tmp_path / INDEX).write_text(json.dumps(index))
    save_file({k: v for k, v in load_file(tmp_path / shard).items() if k != HEAD}, tmp_path / shard)
    with pytest.raises(UserError, match=f"{shard}: its index names {HEAD}"):
        read_model(tmp_path, "hub")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"", lambda b: b[:50],
                                    lambda b: b"version https://git-lfs.github.com/spec/v1\n",
                                    None])  # fmt: skip
@pytest.mark.parametrize("sharded", [True, False])
def test_a_damaged_or_missing_file_is_named(tmp_path: Path, damage: Callable, sharded: bool) -> None:
    save(tmp_path, sharded)
    path = shards(tmp_path)[1] if sharded else tmp_path / WHOLE
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    size = f"{path.stat().st_size} bytes" if damage else "no file"
    with pytest.raises(UserError, match=f"{path}: {size}.*run `make fetch`"):
        read_model(tmp_path, "hub")


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", None), ("config.json", ""), ("config.json", "[]"),
     ("config.json", '{"model_type": "gpt2"}'), ("config.json", '{"model_type": "llama"}'),
     (INDEX, "{"), (INDEX, "[]"), (INDEX, "{}"),
     (INDEX, '{"weight_map": {}}'), (INDEX, '{"weight_map": ["a"]}'), (INDEX, '{"weight_map": {"a": 3}}')],
)  # fmt: skip
def test_a_broken_description_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    save(tmp_path, sharded=True)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path / name}: .*run `make fetch`"):
        read_model(tmp_path, "hub")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"vocab_size": 98},
                                    {"head_dim": 32}, {"num_key_value_heads": 4}])  # fmt: skip
def test_a_config_of_another_shape_is_refused(tmp_path: Path, change: dict) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=r"tensor .*: expected shape .*, found .*"):
        read_model(tmp_path, "hub")
