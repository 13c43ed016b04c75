"""Requests: what a body may hold, in what time it is refused."""

import json

import pytest

from drafter.request import BadRequestError, parse_tokens


def test_a_long_object_with_one_repeated_key_is_refused_at_once():
    """130,000 keys: looking each up among the others would take minutes."""
    keys = ", ".join(f'"{number}": 1' for number in range(130_000))
    with pytest.raises(BadRequestError, match="129999"):
        parse_tokens(f'{{{keys}, "129999": 2}}'.encode(), 100)


def test_a_good_body_is_its_tokens():
    assert parse_tokens(json.dumps({"tokens": [1, 99, 0], "more": None}).encode(), 100) == [1, 99, 0]
