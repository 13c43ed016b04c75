"""The body of a drafting request: read strictly, refused with a sentence that says what is wrong."""

import json
from collections import Counter
from typing import Any, NoReturn

SHOWN_CHARACTERS = 40


class BadRequestError(ValueError):
    """A request that its sender must change; the text goes into the answer."""


def parse_tokens(body: bytes, vocab_size: int) -> list[int]:
    """Read `{"tokens": [int, ...]}`; other keys are ignored.

    Args:
        body: the body as it was sent, JSON in UTF-8.
        vocab_size: ids run from 0 to vocab_size - 1.

    Raises:
        BadRequestError: the body is anything else. Booleans and floats are no integers here.
    """
    fields = _parse(body)
    if not isinstance(fields, dict):
        raise BadRequestError(f'the body must be an object {{"tokens": [...]}}, not {_kind(fields)}')
    if "tokens" not in fields:
        raise BadRequestError('the body has no key "tokens"')
    tokens = fields["tokens"]
    if not isinstance(tokens, list):
        raise BadRequestError(f'"tokens" must be a list of integers, not {_kind(tokens)}')
    if not tokens:
        raise BadRequestError('"tokens" is empty: at least one id is needed to draft from')
    # The quick test covers the good case; only a bad list is walked in Python to name its first offender.
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab_size:
        _name_offender(tokens, vocab_size)
    return tokens


def _parse(body: bytes) -> Any:
    if not body.strip():
        raise BadRequestError('the body is empty; send {"tokens": [int, ...]} as JSON')
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_without_repeats)
    except BadRequestError:
        raise
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None
    except ValueError:
        # What is left is Python's limit on the digits of an integer.
        raise BadRequestError("the body has a number with too many digits") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise BadRequestError(f"the key {_shown(repeated)} stands twice in one object")
    return fields


def _name_offender(tokens: list[Any], vocab_size: int) -> NoReturn:
    for position, token in enumerate(tokens):
        if type(token) is not int:
            raise BadRequestError(f"tokens[{position}] must be an integer, not {_kind(token)}")
        if not 0 <= token < vocab_size:
            raise BadRequestError(
                f"tokens[{position}] is {_shown(token)}; ids run from 0 to {vocab_size - 1}"
            )
    raise AssertionError("a refused list of tokens has no offender")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", int: "an integer"}
    if isinstance(value, bool | float):
        return f"{'a boolean' if isinstance(value, bool) else 'a float'} ({_shown(value)})"
    return names[type(value)]


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
