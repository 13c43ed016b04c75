"""How completion servers are asked, and what they answer: token ids in, token ids and logprobs out.

`vllm` is POST /v1/completions with vLLM's extra parameters, as its documentation of 0.26 to 0.28 has them
(docs.vllm.ai, OpenAI-compatible server, and vllm.entrypoints.openai.completion.protocol); servers before
0.10.2 have no `return_token_ids`, and give ids as "token_id:N" alone. `sglang` is SGLang's native POST
/generate (docs.sglang.io, native API and sampling parameters); its OpenAI route returns no ids of the top-k.
Both list what they serve at GET /v1/models.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafter.engine import Generation

PLACEHOLDER = "token_id:"  # how vLLM writes an id where a token's text would stand
# What a server may have as its own defaults would change the choice of tokens.
NEUTRAL = {"temperature": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


class AnswerError(Exception):
    """An answer that cannot be used: the text says what is wrong with it, after the server's address."""


@dataclass(frozen=True)
class Answer:
    """What both protocols say of one continuation.

    Attributes:
        tokens: its ids, the stop id included.
        top: for each of them the most likely ids and their natural-log probabilities.
        finish: the server's word for why it ended.
        prompt_tokens: how many tokens the server took the prompt for, if it says so.
    """

    tokens: list[int]
    top: list[list[tuple[int, float]]]
    finish: str
    prompt_tokens: int | None


class Dialect(Protocol):
    """One protocol."""

    @property
    def path(self) -> str:
        """Where prompts are posted."""

    @property
    def version_path(self) -> str:
        """Where the server tells its version."""

    def question(self, model: str, prompt: list[int], settings: Generation) -> dict[str, Any]:
        """Return the body that asks for one prompt's greedy continuation."""

    def read(self, body: bytes, model: str, prompt: list[int]) -> Answer:
        """Return what the answer says.

        Raises:
            AnswerError: it is no completion, of another model or prompt, or has no ids or logprobs.
        """


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Logprobs(_Part):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Usage(_Part):
    prompt_tokens: int | None = None


class _Choice(_Part):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(_Part):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    usage: _Usage | None = None


class Vllm:
    """vLLM's /v1/completions."""

    path = "/v1/completions"
    version_path = "/version"

    def question(self, model: str, prompt: list[int], settings: Generation) -> dict[str, Any]:
        """Return the body; `ignore_eos` leaves stopping to the contract's ids alone."""
        return NEUTRAL | {
            "model": model, "prompt": prompt, "n": 1, "stream": False, "max_tokens": settings.max_tokens,
            "stop_token_ids": list(settings.stop_ids), "ignore_eos": True, "skip_special_tokens": False,
            "logprobs": settings.top_k, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip

    def read(self, body: bytes, model: str, prompt: list[int]) -> Answer:
        """Return what the answer says; see Dialect."""
        found = parsed(_Completion, body)
        if found.model != model:
            raise AnswerError(f"answers as {found.model!r}, where {model!r} was asked for")
        (choice,) = found.choices
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt:
            raise AnswerError("took the prompt for other token ids than it was given")
        logprobs = choice.logprobs
        named = [_id_of(name) for name in logprobs.tokens] if logprobs else []
        tokens = choice.token_ids if choice.token_ids is not None else named
        if None in tokens or (choice.token_ids is None and not logprobs):
            raise AnswerError("returns no token ids (vLLM does from 0.10.2, and before with logprobs)")
        ids = [token for token in tokens if token is not None]
        if logprobs is None or logprobs.top_logprobs is None:
            raise AnswerError("returns no logprobs")
        if None not in named and named != ids:
            raise AnswerError("gives one continuation as token_ids and another with its logprobs")
        top = [_named_top(position, place) for place, position in enumerate(logprobs.top_logprobs)]
        usage = found.usage.prompt_tokens if found.usage else None
        return Answer(ids, top, choice.finish_reason or "", usage)


Entry = tuple[float | None, int, Any]  # logprob, id, text


class _Meta(_Part):
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int | None = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None


class _Generated(_Part):
    output_ids: list[int] | None = None
    meta_info: _Meta


class Sglang:
    """SGLang's /generate."""

    path = "/generate"
    version_path = "/get_server_info"

    def question(self, model: str, prompt: list[int], settings: Generation) -> dict[str, Any]:
        """Return the body; SGLang's `ignore_eos` would ignore the stop ids as well, so it is not set."""
        del model  # a server has one
        sampling = NEUTRAL | {
            "max_new_tokens": settings.max_tokens, "stop_token_ids": list(settings.stop_ids),
            "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip
        return {"input_ids": prompt, "sampling_params": sampling, "stream": False, "return_logprob": True,
                "top_logprobs_num": settings.top_k, "return_text_in_logprobs": False}

    def read(self, body: bytes, model: str, prompt: list[int]) -> Answer:
        """Return what the answer says; see Dialect."""
        found = parsed(_Generated, body)
        meta, ids = found.meta_info, found.output_ids
        if meta.output_token_logprobs is None or meta.output_top_logprobs is None:
            lacks = "logprobs" if ids is not None else "token ids"
            raise AnswerError(f"returns no {lacks}")
        tokens = [token for _, token, _ in meta.output_token_logprobs]
        finish = str((meta.finish_reason or {}).get("type", ""))
        # A stop id may have been trimmed from the ids; the logprobs have it.
        if ids not in (None, tokens, tokens[:-1] if finish == "stop" else tokens):
            raise AnswerError("gives one continuation as output_ids and another with its logprobs")
        top = [_listed_top(position, place) for place, position in enumerate(meta.output_top_logprobs)]
        return Answer(tokens, top, finish, meta.prompt_tokens)


class _Model(_Part):
    id: str


class _Models(_Part):
    data: list[_Model]


DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang()}


def parsed[Shape: BaseModel](shape: type[Shape], body: bytes) -> Shape:
    """Read a JSON body.

    Raises:
        AnswerError: it is not JSON, or of another shape.
    """
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise AnswerError(f"answers something else than was asked for: {place or 'body'}: "
                          f"{fault['msg']}") from None


def served(body: bytes) -> list[str]:
    """Return the names of the models that GET /v1/models lists.

    Raises:
        AnswerError: it lists none.
    """
    return [model.id for model in parsed(_Models, body).data]


def version(body: bytes) -> str:
    """Return the version that a server tells of itself; 'untold' where it does not."""
    try:
        found = json.loads(body)
    except ValueError:
        return "untold"
    told = found.get("version") if isinstance(found, dict) else None
    return told if isinstance(told, str) and told else "untold"


def _id_of(name: str) -> int | None:
    number = name.removeprefix(PLACEHOLDER)
    return int(number) if number != name and number.isascii() and number.isdigit() else None


def _named_top(position: dict[str, float] | None, place: int) -> list[tuple[int, float]]:
    pairs = [(_id_of(name), value) for name, value in (position or {}).items()]
    if not pairs:
        raise AnswerError(f"returns no logprobs at position {place}")
    found = [(token, value) for token, value in pairs if token is not None]
    if len(found) < len(pairs):
        raise AnswerError(f"returns no token ids in the top-k of position {place}: it does not know "
                          "return_tokens_as_token_ids")
    return found


def _listed_top(position: list[Entry] | None, place: int) -> list[tuple[int, float]]:
    found = [(token, value) for value, token, _ in position or [] if value is not None]
    if not position or len(found) < len(position):
        raise AnswerError(f"returns no logprobs at position {place}")
    return found
