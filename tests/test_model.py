"""The decoder against transformers' own Llama and Qwen3, and what it refuses to be."""

from dataclasses import replace

import pytest
import torch
from alone import FAMILIES, reference
from conftest import small_config, small_decoder
from transformers import LlamaConfig

from drafter.config import ModelConfig
from drafter.engine import Engine, Generation
from drafter.model import EMBEDDING, HEAD, Decoder, build

SHAPES = [(family, tied) for family in FAMILIES for tied in (True, False)]
LLAMA = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
         "num_hidden_layers": 3, "num_attention_heads": 4, "rms_norm_eps": 1e-5}  # fmt: skip


def logits(decoder: Decoder, tokens_bt: torch.Tensor) -> torch.Tensor:
    return decoder.logits(decoder(tokens_bt, torch.arange(tokens_bt.shape[1])[None]))


@pytest.mark.parametrize(("family", "tied"), SHAPES)
@torch.no_grad()
def test_logits_are_those_of_transformers(family: str, tied: bool) -> None:
    decoder = small_decoder(family, seed=3, layers=3, tied=tied)
    theirs = reference(decoder, family)
    tokens_bt = torch.randint(0, 97, (3, 200), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens_bt).logits
    assert expected.std() > 1  # else the bound below would say nothing
    torch.testing.assert_close(logits(decoder, tokens_bt), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "tied"), SHAPES)
@torch.no_grad()
def test_transformers_state_dict_and_config_make_the_same_model(family: str, tied: bool) -> None:
    theirs = reference(small_decoder(family, seed=4, tied=tied), family)
    config = ModelConfig.from_transformers(theirs.config.to_dict())
    assert config == small_config(family, tied=tied)
    decoder = build(config, theirs.state_dict(), torch.float32, "cpu")
    tokens_bt = torch.arange(40)[None]
    torch.testing.assert_close(logits(decoder, tokens_bt), theirs(tokens_bt).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "tied"), SHAPES)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(family: str, tied: bool) -> None:
    decoder = small_decoder(family, seed=5, tied=tied)
    theirs = reference(decoder, family)
    prompts = [list(range(7, 7 + size)) for size in (1, 9, 3, 60)]
    expected = []
    for prompt in prompts:
        made = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                               do_sample=False, max_new_tokens=16)  # fmt: skip
        expected.append(made[0, len(prompt) :].tolist())
    assert len({tuple(row) for row in expected}) == len(prompts)
    engine = Engine(decoder, 96, slots=4)
    assert engine.draft(prompts, 16) == expected
    assert [engine.draft([prompt], 16)[0] for prompt in prompts] == expected
    generated = engine.generate(prompts, Generation(max_tokens=16))
    assert [row.tokens for row in generated] == expected


@torch.no_grad()
def test_positions_turn_by_distance_only() -> None:
    decoder = small_decoder()
    tokens_bt = torch.arange(12)[None]
    here = decoder(tokens_bt, torch.arange(12)[None])
    there = decoder(tokens_bt, torch.arange(500, 512)[None])
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)
    stretched = decoder(tokens_bt, torch.arange(0, 24, 2)[None])
    assert (here - stretched).abs().max() > 0.1


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    config = ModelConfig.from_transformers(LLAMA)
    theirs = LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})
    assert (config.kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim) == (4, 4)
    assert (config.rope_theta, config.tied) == (theirs.rope_theta, theirs.tie_word_embeddings)
    assert not config.qk_norm


@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None},
     {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
     {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}],
)  # fmt: skip
def test_plain_rope_in_every_spelling(rope: dict) -> None:
    assert ModelConfig.from_transformers(LLAMA | rope).rope_theta == (5e5 if rope else 1e4)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"model_type": kind}, "model_type") for kind in ("mistral", "qwen2", "gpt2", None)]
    + [({"rope_scaling": {"rope_type": kind, "factor": 8.0}}, "RoPE") for kind in ("linear", "llama3")]
    + [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE"),
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}, "sliding"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "32"}, "vocab_size"),
    ],
)
def test_other_architectures_are_refused(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_transformers(LLAMA | change)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "rms_norm_eps"])
def test_a_config_without_a_size_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_transformers({key: value for key, value in LLAMA.items() if key != name})


def test_config_survives_json() -> None:
    config = replace(small_config("qwen3", tied=False), rope_theta=1e10)
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "null", "not json", small_config().to_json().replace('"layers": 2', '"layers": "2"'),
     small_config().to_json().replace('"layers": 2', '"layers": true'),
     small_config().to_json().replace('"layers"', '"depth"'),
     small_config().to_json().replace("}", ', "more": 1}'),
     small_config().to_json().replace('"heads": 4', '"heads": -4'),
     small_config().to_json().replace('"hidden_size": 64', f'"hidden_size": {2**62}'),
     small_config().to_json().replace('"rms_eps": 1e-06', '"rms_eps": NaN'),
     small_config().to_json().replace('"rope_theta": 10000.0', '"rope_theta": Infinity')],
)  # fmt: skip
def test_a_config_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"config|Expecting"):
        ModelConfig.from_json(text)


def test_a_tied_head_may_come_along_but_not_differ() -> None:
    config, state = small_config(), small_decoder().state_dict()
    same = build(config, state | {HEAD: state[EMBEDDING].clone()}, torch.float32, "cpu")
    assert same.state_dict().keys() == state.keys()
    other = state[EMBEDDING].clone()
    other[3, 3] += 1
    with pytest.raises(ValueError, match=f"{HEAD}.*{EMBEDDING}"):
        build(config, state | {HEAD: other}, torch.float32, "cpu")


@pytest.mark.parametrize("name", [EMBEDDING, "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_misshapen_or_unknown_tensor_is_named(name: str) -> None:
    state = small_decoder().state_dict()
    without = {key: value for key, value in state.items() if key != name}
    for wrong in (without, without | {name: state[name][:-1]}, without | {f"{name}x": state[name]}):
        with pytest.raises(ValueError, match=name):
            build(small_config(), wrong, torch.float32, "cpu")
    with pytest.raises(ValueError, match=EMBEDDING):
        build(small_config(), {HEAD: state[EMBEDDING]}, torch.float32, "cpu")
