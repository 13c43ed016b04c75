"""bench-serve's replay: it asks for exactly the tokens it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay import MOST_TOKENS, PROMPT_TOKENS, sizes


@given(conversations=st.integers(1, 60), data=st.data())
def test_a_plan_has_all_of_its_tokens(conversations: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(conversations, conversations * MOST_TOKENS))
    plan = sizes(conversations, tokens, 900)
    assert len(plan) == conversations
    assert sum(wanted for _, wanted in plan) == tokens
    assert all(1 <= wanted <= MOST_TOKENS and PROMPT_TOKENS[0] <= prompt <= 900 for prompt, wanted in plan)


@pytest.mark.parametrize("tokens", [1, 2 * MOST_TOKENS + 1])
def test_a_plan_that_cannot_be_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        sizes(2, tokens, 900)
