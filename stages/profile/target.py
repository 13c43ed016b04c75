"""The sections on the model to be sped up: what it is, what is fetched, and who writes its text."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from stages.profile.section import Count, Dtype, Name, Section, Share


def _with_port(address: str) -> str:
    if not urlsplit(address).port:  # it raises where the number is too large, or the host none
        raise ValueError("Port out of range 1-65535")
    return address


# Scheme, host and port, and no more: no path, no credentials.
Address = Annotated[str, Field(pattern=r"^https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$"),
                    AfterValidator(_with_port)]


class Target(Section):
    """The model to be sped up: where it comes from and how it is spoken to."""

    source: Name
    format: Literal["gguf", "hub"]
    name: str
    revision: str
    token_count: Count
    stop_ids: tuple[int, ...] = Field(min_length=1)
    template_arguments: dict[str, bool | str | int] = Field(default_factory=dict)
    max_prompt_tokens: Count = 1536
    max_continuation_tokens: Count = 256


class Fetch(Section):
    """What is brought to vendor/: ids of lock/sources.toml, and the wheels of lock/serve.txt."""

    sources: tuple[Name, ...] = Field(min_length=1)


class Teacher(Section):
    """The target's greedy continuations with its top-k logprobs.

    Dev conversations that come with continuations stop the run, before any training prompt is continued, if
    less than `min_fidelity` of them is reproduced (see stages/fidelity.py); 0 never does. Where none of them
    has one, the run says so. Of the 40 examples it is only reported: nothing is ever decided on them.

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
    and gives token ids, `in_flight` the prompts that it is asked at once, and `timeout_s` what one may
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
