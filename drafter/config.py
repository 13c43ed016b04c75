"""The shape of a decoder, and how transformers' config.json states it."""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# Features of other Llama and Qwen3 configs that this decoder lacks, each with the value that means without.
PLAIN = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}

MOST = 2**31  # of any of its whole numbers


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied: bool
    qk_norm: bool

    def to_json(self) -> str:
        """Serialise for a safetensors header."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """Read what `to_json` wrote.

        Raises:
            ValueError: a key is missing, unknown, of the wrong type or no positive number.
        """
        values = json.loads(text)
        known = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != set(known):
            raise ValueError(f"a model config has the keys {', '.join(sorted(known))}")
        for name, kind in known.items():
            if kind is float and type(values[name]) is int:
                values[name] = float(values[name])
            if type(values[name]) is not kind:
                raise ValueError(f"model config: {name} is {values[name]!r}, which is no {kind}")
            if kind is not bool:
                _positive(values, name, kinds=(kind,))
        return cls(**values)

    @classmethod
    def from_transformers(cls, values: dict[str, Any]) -> "ModelConfig":
        """Translate a transformers config.json of a Llama or Qwen3 model.

        Raises:
            ValueError: another architecture, a feature (scaled RoPE, biases) that this decoder lacks, or a
                size that is missing or no positive number.
        """
        kind = values.get("model_type")
        if kind not in ("llama", "qwen3"):
            raise ValueError(f"model_type is {kind!r}; llama and qwen3 are supported")
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError("scaled RoPE is not supported")
        for name, plain in PLAIN.items():
            if values.get(name, plain) != plain:
                raise ValueError(f"{name} = {values[name]!r} is not supported")
        hidden, heads = _positive(values, "hidden_size"), _positive(values, "num_attention_heads")
        return cls(
            vocab_size=_positive(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(values, "intermediate_size"),
            layers=_positive(values, "num_hidden_layers"),
            heads=heads,
            kv_heads=_positive(values, "num_key_value_heads", heads),
            head_dim=_positive(values, "head_dim", hidden // heads),
            rope_theta=float(_positive(rope | values, "rope_theta", 10_000, (int, float))),
            rms_eps=float(_positive(values, "rms_norm_eps", None, (int, float))),
            tied=bool(values.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
        )

    def with_layers(self, layers: int) -> "ModelConfig":
        """Return the same shape at another depth."""
        return replace(self, layers=layers)


def _positive(
    values: dict[str, Any], name: str, default: Any = None, kinds: tuple[type, ...] = (int,)
) -> Any:
    value = default if values.get(name) is None else values[name]
    if type(value) not in kinds or not 0 < value < (math.inf if float in kinds else MOST):
        raise ValueError(f"the model's config: {name} is {value!r}; expected a positive number")
    return value
