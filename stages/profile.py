"""Profiles: one TOML file per job, checked whole before any work."""

import json
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.errors import UserError
from stages.upstream.pinned import FILE as SOURCES_FILE
from stages.upstream.pinned import read_sources

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
# Scheme, host and port, and no more: no path, no credentials.
Address = Annotated[str, Field(pattern=r"^https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$")]

Way = Literal["opening", "system", "subject", "beginning", "examples", "follow-up"]  # stages/sources/leads.py

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class Section(BaseModel):
    """A table of the profile: frozen, and with no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Limits(Section):
    """Bytes: the weights' allotment is the limit less the reserve for code, wheels and evidence."""

    limit_bytes: Count
    reserve_bytes: Count

    @property
    def allotment_bytes(self) -> int:
        """Bytes that the packed weights may take."""
        return self.limit_bytes - self.reserve_bytes

    @model_validator(mode="after")
    def _reserve_below_limit(self) -> Self:
        if self.reserve_bytes >= self.limit_bytes:
            raise ValueError(f"reserve_bytes must be below limit_bytes ({self.limit_bytes})")
        return self


class Target(Section):
    """The model to be sped up: where it comes from and how it is spoken to."""

    source: Name
    format: Literal["gguf", "hub"]
    name: str
    revision: str
    token_count: Count
    stop_ids: tuple[int, ...] = Field(min_length=1)
    template_arguments: dict[str, bool | str | int] = {}
    max_prompt_tokens: Count = 1536
    max_continuation_tokens: Count = 256


class Fetch(Section):
    """What is brought to vendor/: ids of lock/sources.toml, and the wheels of lock/serve.txt."""

    sources: tuple[Name, ...] = Field(min_length=1)


class LocalFile(Section):
    """A file of the user's own, under the repository's folder, by its hash."""

    path: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _inside(self) -> Self:
        parts = PurePosixPath(self.path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError("path must be relative and stay under the repository's folder")
        return self


class DataSource(Section):
    """One source of training prompts.

    `source` (an id of lock/sources.toml) belongs to the kinds `hub` and `package`; `files`, `uri` and
    `licence` to `jsonl` and `parquet`; `columns` and `category` to all four; temperature, top_p, the turn's
    tokens and `ways` (how the target is led to invent; empty: all) to `synth`. `heldout` keeps the whole
    source for choosing.
    """

    id: Name
    kind: Literal["template", "synth", "hub", "package", "jsonl", "parquet"]
    rows: Count
    source: Name | None = None
    files: tuple[LocalFile, ...] = ()
    uri: str | None = None
    licence: str | None = None
    split: str = "train"
    columns: dict[str, str] = {}
    category: str | None = None
    heldout: bool = False
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    max_turn_tokens: Count = 96
    min_turn_tokens: Count = 6
    ways: tuple[Way, ...] = ()

    @model_validator(mode="after")
    def _keys_of_kind(self) -> Self:
        if self.ways and self.kind != "synth":
            raise ValueError("ways belong to kind 'synth'")
        if (self.kind in ("hub", "package")) != (self.source is not None):
            raise ValueError("kinds 'hub' and 'package' need source, an id of lock/sources.toml; "
                             "other kinds take none")
        stated = (bool(self.files), self.uri is not None, self.licence is not None)
        if any(stated) != all(stated) or (self.kind in ("jsonl", "parquet")) != any(stated):
            raise ValueError("kinds 'jsonl' and 'parquet' need files, uri and licence; other kinds take none")
        return self


class Data(Section):
    """Prompts for training, and those split off for choosing.

    `category_limits` gives the most that a category may have, as a share of all rows that are asked for.
    `decontaminate` names further JSON-lines files whose conversations must not be trained on.
    """

    heldout_share: Share = 0.1
    max_prompt_tokens: Count
    shared_words: Count = 13
    near_duplicate: Rate = 0.8
    near_evaluation: Rate = 0.5
    decontaminate: tuple[str, ...] = ()
    category_limits: dict[str, Share] = {}
    sources: tuple[DataSource, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct_ids(self) -> Self:
        ids = [source.id for source in self.sources]
        if len(set(ids)) < len(ids):
            raise ValueError(f"two sources share an id: {ids}")
        if all(source.heldout for source in self.sources):
            raise ValueError("every source is held out: none is left to train on")
        return self


class Teacher(Section):
    """The target's greedy continuations with its top-k logprobs.

    Dev conversations that come with continuations stop the run if less than `min_fidelity` of them is
    reproduced (see stages/fidelity.py); 0 never does.

    `engine` names a module of stages/writers/: "own" runs the target here, "openai" asks [servers].
    """

    engine: Literal["own", "openai"] = "own"
    dtype: Dtype
    max_tokens: Count
    top_k: Annotated[int, Field(ge=1, le=256)] = 16
    shard_rows: Count = 128
    stop_on_repeat: Annotated[int, Field(ge=0)] = 0
    context_tokens: Count
    min_fidelity: Share = 0.0


class Servers(Section):
    """Completion servers that hold the target, for teacher.engine = "openai". No part of any key.

    Nothing else may be reached. A server must serve the target under target.name. `protocol` is how it takes
    and gives token ids, `in_flight` the prompts that a rank asks it at once, and `timeout_s` what one may
    take. An API key comes from the environment: TEACHER_API_KEY.
    """

    addresses: tuple[Address, ...] = ()
    protocol: Literal["vllm", "sglang"] = "vllm"
    in_flight: Count = 64
    timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _distinct_addresses(self) -> Self:
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError("addresses names a server twice")
        return self


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


class Checkpoints(Section):
    """Where a killed stage goes on from, and how often a training saves. No part of any key.

    On a rented machine `folder` is best a disk that outlives it; empty is build/<profile>/.work.
    """

    folder: str = ""
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


class Serve(Section):
    """Limits of the server that is shipped."""

    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 16
    context_tokens: Count = 2048
    max_batch: Count = 32
    dtype_cpu: Dtype = "float32"


class Selfcheck(Section):
    """The rehearsal's numbers, as the contract states them."""

    in_flight: Count = 32
    request_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    budget_s: Annotated[float, Field(gt=0)] = 10800.0
    heldout_tokens: Count = 44314
    failure_share: Share = 0.05
    retries: Annotated[int, Field(ge=0)] = 2


class Profile(Section):
    """A whole job."""

    name: Name
    device: Literal["cpu", "cuda"]
    seed: Annotated[int, Field(ge=0)] = 0
    limits: Limits
    target: Target
    fetch: Fetch
    data: Data
    teacher: Teacher
    start: Start
    distill: Distill
    qat: Qat
    serve: Serve
    selfcheck: Selfcheck
    checkpoints: Checkpoints = Checkpoints()
    servers: Servers = Servers()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        needed = [self.target.source, self.start.source, *(source.source for source in self.data.sources)]
        missing = [source for source in needed if source and source not in self.fetch.sources]
        if missing:
            raise ValueError(f"fetch.sources must name {', '.join(missing)}")
        longest = max(self.data.max_prompt_tokens, self.target.max_prompt_tokens)
        if self.teacher.context_tokens < longest + self.teacher.max_tokens:
            raise ValueError(
                f"teacher.context_tokens must hold the longest prompt and teacher.max_tokens: at least "
                f"{longest + self.teacher.max_tokens}"
            )
        slow = [name for name in ("distill", "qat") if getattr(self, name).dtype == "float32"]
        if self.device == "cuda" and slow:
            raise ValueError(f"{slow[0]}.dtype must be 'bfloat16' where device is 'cuda': its attention over "
                             "packed rows takes no other")
        if (self.teacher.engine == "openai") != bool(self.servers.addresses):
            raise ValueError("teacher.engine = 'openai' needs servers.addresses, and only it takes them")
        if self.teacher.max_tokens > self.target.max_continuation_tokens:
            raise ValueError("teacher.max_tokens must not be over target.max_continuation_tokens")
        if unknown := [stop for stop in self.target.stop_ids if not 0 <= stop < self.target.token_count]:
            raise ValueError(f"target.stop_ids: {unknown[0]} is not below target.token_count")
        return self


def load_profile(name: str, folder: Path) -> Profile:
    """Read `folder/NAME.toml`, lay it over what it extends, and check the whole.

    Raises:
        UserError: no such profile, not TOML, a cycle of `extends`, or any key, type or value that is not
            allowed; the text names the file, the key and what is allowed.
    """
    merged = _merged(name, folder, seen=())
    merged["name"] = name
    path = folder / f"{name}.toml"
    try:
        profile = Profile.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        raise UserError(_explain(path, error)) from error
    pinned = read_sources(folder.parent / SOURCES_FILE)
    if unknown := [source for source in profile.fetch.sources if source not in pinned]:
        known = ", ".join(sorted(pinned))
        raise UserError(f"{path}: fetch.sources: {SOURCES_FILE} pins no {unknown[0]!r}. It pins: {known}")
    return profile


def _merged(name: str, folder: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    path = folder / f"{name}.toml"
    if name in seen:
        raise UserError(f"{path}: extends itself, by way of {' -> '.join(seen)}")
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise UserError(f"{path}: there is no such profile. Profiles: {known}")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from error
    parent = own.pop("extends", None)
    if parent is None:
        return own
    if not isinstance(parent, str):
        raise UserError(f"{path}: extends: takes the name of one profile")
    return _over(_merged(parent, folder, (*seen, name)), own)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay one table over another: tables merge key by key, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def _explain(path: Path, error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "profile"
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text = f"unknown key. Allowed here: {_allowed(fault['loc'][:-1])}"
        elif fault["type"] == "missing":
            text = "is missing"
        elif not isinstance(fault["input"], dict):
            text += f" (found {fault['input']!r})"
        lines.append(f"{path}: {key}: {text}")
    return "\n".join(lines)


def _allowed(location: tuple[int | str, ...]) -> str:
    model: Any = Profile
    for part in location:
        if isinstance(part, str):
            model = model.model_fields[part].annotation
            model = next((a for a in getattr(model, "__args__", ()) if isinstance(a, type)), model)
    return ", ".join(sorted(model.model_fields))
