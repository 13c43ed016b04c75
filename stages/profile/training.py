"""The sections on the drafter: what it starts from, and how it is trained and packed."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from stages.profile.section import Count, Dtype, Name, Rate, Section, Share


class Shape(Section):
    """The shape of a drafter that starts from nothing; vocabulary, norms and RoPE are the target's."""

    layers: Count
    hidden_size: Count
    intermediate_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads or self.head_dim % 8:
            raise ValueError("heads must be a multiple of kv_heads, and head_dim of 8")
        return self


class Start(Section):
    """What the drafter starts from: layers of the target or of another pretrained model, or nothing."""

    base: Literal["target", "source", "scratch"] = "target"
    source: Name | None = None
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    shape: Shape | None = None

    @model_validator(mode="after")
    def _keys_of_base(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must be in rising order, each once (empty keeps all)")
        if (self.base == "source") != (self.source is not None):
            raise ValueError("base = 'source' needs source, and only it takes one")
        if (self.base == "scratch") != (self.shape is not None):
            raise ValueError("base = 'scratch' needs shape, and only it takes one")
        if self.base == "scratch" and self.layers:
            raise ValueError("base = 'scratch' keeps no layers: say how many in shape.layers")
        return self


class Training(Section):
    """A training run of fixed work; 0 steps change nothing."""

    dtype: Dtype
    steps: Annotated[int, Field(ge=0)]
    batch_tokens: Count
    learning_rate: Rate
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    ce_share: Share = 0.5
    kl: Literal["top-k", "whole"] = "top-k"
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    max_row_tokens: Count = 512
    train_embedding: bool = True
    optimiser: Literal["torch", "bitsandbytes"] = "torch"  # AdamW with float32 moments, or 8-bit ones
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    activation_checkpointing: bool = False
    deterministic: bool = False
    evaluations: Count = 1

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.steps and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        if self.max_row_tokens > self.batch_tokens:
            raise ValueError(f"max_row_tokens ({self.max_row_tokens}) must not be over batch_tokens "
                             f"({self.batch_tokens}): a row is never split")
        return self


def _with_home(folder: str) -> str:
    try:
        Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError("there is no such home folder here") from error
    return folder


class Checkpoints(Section):
    """Where a killed stage goes on from, and how often a training saves. No part of any key.

    On a rented machine `folder` is best a disk that outlives it; empty is build/<profile>/.work.
    """

    folder: Annotated[str, AfterValidator(_with_home)] = ""
    minutes: Annotated[float, Field(ge=0)] = 5.0


class Distill(Training):
    """bf16 distillation of the pruned start; 0 steps only measure its row sensitivities."""


class Qat(Training):
    """Training through the codec's rounding; 0 steps only pack.

    `codec_embedding` is for embedding and head, where they differ. `group` (32 unless given) belongs to int4
    and nf4, `clip` (a search for the best clipping) to int4, `fisher_exponent` and `learn_steps` to entropy.
    `rank` is that of a low-rank correction, and `zstd` a level, over any fixed-rate codec; 0 is without.
    """

    codec: Literal["entropy", "int4", "int8", "fp8", "nf4", "bf16"]
    codec_embedding: Literal["int4", "int8", "fp8", "nf4", "bf16"] | None = None
    group: Literal[32, 64, 128] | None = None
    clip: bool = False
    rank: Annotated[int, Field(ge=0, le=256)] = 0
    zstd: Annotated[int, Field(ge=0, le=22)] = 0
    fisher_exponent: Share = 1.0
    learn_steps: bool = False

    @model_validator(mode="after")
    def _keys_of_codec(self) -> Self:
        codecs = {self.codec, self.codec_embedding}
        if self.group and not codecs & {"int4", "nf4"}:
            raise ValueError("group belongs to the codecs 'int4' and 'nf4'")
        if self.clip and "int4" not in codecs:
            raise ValueError("clip belongs to codec 'int4'")
        if self.codec == "entropy" and (self.rank or self.zstd or self.clip or self.codec_embedding):
            raise ValueError("codec 'entropy' takes no rank, zstd, clip or codec_embedding")
        if self.codec != "entropy" and (self.learn_steps or self.fisher_exponent != 1.0):
            raise ValueError("learn_steps and fisher_exponent belong to codec 'entropy'")
        return self
