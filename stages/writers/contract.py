"""What a server's continuation must be like to be the target's greedy text, as the contract has it."""

import math

import torch

from drafter.engine import Generated, Generation
from stages.writers.protocols import Answer, AnswerError

# A chosen token may lie so far below the most likely one and pass for a tie, and a logprob so far above 0.
TOLERANCE = 1e-3


def checked(answer: Answer, prompt: list[int], settings: Generation, token_count: int) -> Generated:
    """Return an answer as a row of a shard, cut where it repeats itself, if the settings say so.

    Raises:
        AnswerError: it breaks the contract; the text says how.
    """
    if answer.prompt_tokens not in (None, len(prompt)):
        raise AnswerError(f"read {answer.prompt_tokens} tokens of a prompt of {len(prompt)}")
    _check_ids(answer, token_count)
    _check_end(answer, settings)
    ids, logprobs = [], []
    for place, (token, top) in enumerate(zip(answer.tokens, answer.top, strict=True)):
        chosen = _top_k(token, dict(top), settings.top_k, place)
        ids.append([one for one, _ in chosen])
        logprobs.append([value for _, value in chosen])
    stopped = answer.tokens[-1] in settings.stop_ids
    length = len(answer.tokens) - stopped
    kept = first_repeat(answer.tokens[:length], settings.stop_on_repeat)
    ended = "repeat" if kept < length else "stop" if stopped else "cap"
    kept = len(answer.tokens) if kept == length else kept
    return Generated(answer.tokens[:kept], torch.tensor(ids[:kept], dtype=torch.int32),
                     torch.tensor(logprobs[:kept], dtype=torch.float32), ended)


def first_repeat(tokens: list[int], size: int) -> int:
    """Return how many tokens stand before the first n-gram of `size` that recurs; all where none does."""
    seen: set[tuple[int, ...]] = set()
    for end in range(size, len(tokens) + 1) if size else ():
        gram = tuple(tokens[end - size : end])
        if gram in seen:
            return end - size
        seen.add(gram)
    return len(tokens)


def _check_ids(answer: Answer, token_count: int) -> None:
    if len(answer.top) != len(answer.tokens):
        raise AnswerError(f"gives logprobs of {len(answer.top)} positions for {len(answer.tokens)} tokens")
    for token in [*answer.tokens, *(token for top in answer.top for token, _ in top)]:
        if not 0 <= token < token_count:
            raise AnswerError(f"returns the id {token}, and target.token_count is {token_count}: it serves "
                              "another model or tokenizer")


def _check_end(answer: Answer, settings: Generation) -> None:
    count, cap, stops = len(answer.tokens), settings.max_tokens, settings.stop_ids
    if not count:
        raise AnswerError("returns an empty continuation")
    if count > cap:
        raise AnswerError(f"returns {count} tokens, where {cap} are the most")
    early = next((place for place, token in enumerate(answer.tokens) if token in stops), count)
    if early < count - 1:
        raise AnswerError(f"writes on after the stop id {answer.tokens[early]}")
    if early < count and answer.finish in ("stop", "length"):
        return
    if answer.finish == "stop":
        raise AnswerError(f"stopped at the id {answer.tokens[-1]}, which target.stop_ids does not have")
    if answer.finish != "length":
        raise AnswerError(f"ended a continuation with {answer.finish or 'no reason'!r}, "
                          "where 'stop' and 'length' are known")
    if count < cap:
        raise AnswerError(f"ended for its length after {count} tokens of {cap}: it takes too short a context")


def _top_k(token: int, top: dict[int, float], count: int, place: int) -> list[tuple[int, float]]:
    """Return the `count` most likely ids with their logprobs, the chosen one first."""
    if len(top) < count:
        raise AnswerError(f"gives {len(top)} logprobs at position {place}, where {count} were asked for")
    if not all(math.isfinite(value) and value <= TOLERANCE for value in top.values()):
        raise AnswerError(f"gives a logprob at position {place} that is none")
    if token not in top or top[token] < max(top.values()) - TOLERANCE:
        raise AnswerError(f"did not choose the most likely token at position {place}: it does not write "
                          "greedily")
    ranked = sorted(top.items(), key=lambda one: (one[0] != token, -one[1]))
    return ranked[:count]
