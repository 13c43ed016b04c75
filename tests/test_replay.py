"""Tau's one definition: the loop, its end, the simulation of it, and the sums over conversations."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.replay import (
    Conversation,
    Steps,
    paired,
    read_conversations,
    replay_offline,
    simulate,
    summary,
    verify,
)


def conversation(continuation, prompt=(1, 2, 3), name="a", category="math"):
    return Conversation(name, category, tuple(prompt), tuple(continuation))


def greedy_drafter(prompt, continuation, agrees, wrong=-1):
    """Return a drafter whose greedy choice agrees just where told, and that goes wrong after a wrong id."""

    def draft(context):
        start = len(context) - len(prompt)
        drafted = []
        for index in range(start, start + 16):
            on_course = drafted == list(continuation[start:index]) and index < len(continuation)
            right = on_course and agrees[index]
            drafted.append(continuation[index] if right else wrong)
        return drafted

    return draft


@pytest.mark.parametrize(
    ("draft", "rest", "length"),
    [([], [5, 6], 0), ([5], [5, 6], 1), ([5, 7], [5, 6], 1), ([5, 6, 7], [5, 6], 2), ([6, 6], [5, 6], 0)],
)
def test_accepts_the_longest_equal_prefix(draft, rest, length):
    assert verify(draft, rest) == length


def test_worked_example():
    # Two accepted + 1, none + 1, three accepted + 1, then two accepted at the end and no token left.
    continuation = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    drafts = {3: [10, 11, 99], 6: [], 7: [14, 15, 16, 99], 11: [18, 19, 20, 21]}
    asked = []

    def draft(context):
        asked.append(list(context))
        return drafts[len(context)]

    steps = replay_offline(conversation(continuation), draft)
    assert steps == Steps(accepted=(2, 0, 3, 2), offered=(3, 0, 4, 2), tokens=10)
    assert asked == [[1, 2, 3, *continuation[:n]] for n in (0, 3, 4, 8)]
    assert summary([conversation(continuation)], [steps]).tau == 10 / 4


def test_a_perfect_drafter_adds_one_token_of_the_target_to_each_sixteen():
    assert simulate([True] * 17).accepted == (16,)
    assert simulate([True] * 18).accepted == (16, 1)
    assert simulate([True] * 16).accepted == (16,)
    assert simulate([True] * 34).accepted == (16, 16)
    assert simulate([]) == Steps((), (), 0)


def test_a_drafter_that_is_never_right_has_tau_one():
    steps = simulate([False] * 40)
    assert (steps.count, summary([conversation(range(40))], [steps]).tau) == (40, 1.0)


@given(st.lists(st.sampled_from([True, True, True, False]), max_size=120))
def test_simulation_takes_the_steps_of_the_loop(agrees):
    continuation = list(range(100, 100 + len(agrees)))
    draft = greedy_drafter((1, 2, 3), continuation, agrees)
    replayed = replay_offline(conversation(continuation), draft)
    simulated = simulate(np.array(agrees, dtype=bool))
    assert simulated == replayed
    advanced = [min(a + 1, 16 + 1) for a in simulated.accepted]
    # Only the last step may lack its target token.
    assert sum(advanced) - simulated.tokens in ({0, 1} if agrees else {0})


def test_a_draft_of_more_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="at most 16 ids, this one has 17"):
        replay_offline(conversation(range(40)), lambda context: [0] * 17)


def test_acceptance_by_position_counts_what_was_reached():
    talk = conversation([10, 11, 12, 13, 14])
    drafts = {3: [10, 99, 12], 5: [12, 13, 99]}
    tau = summary([talk], [replay_offline(talk, lambda context: drafts[len(context)])])
    # Position 3 of the first draft was never reached: position 2 was wrong.
    seen = [(p.position, p.reached, p.accepted) for p in tau.positions]
    assert seen == [(1, 2, 2), (2, 2, 1), (3, 1, 0)]


def test_tau_is_a_ratio_of_sums_and_macro_a_mean_of_ratios():
    talks = [conversation(range(30)), conversation(range(10), name="b", category="stem")]
    steps = [simulate([True] * 30), simulate([False] * 10)]
    tau = summary(talks, steps)
    assert (tau.tokens, tau.steps, tau.conversations) == (40, 12, 2)
    assert tau.tau == pytest.approx(40 / 12)
    assert tau.macro == pytest.approx((15 + 1) / 2)
    assert tau.categories == {"math": 15.0, "stem": 1.0}
    json.dumps(tau.to_json(), allow_nan=False)


def test_empty_continuations_count_nothing():
    talks = [conversation(range(10)), conversation([], name="b", category="stem")]
    tau = summary(talks, [simulate([True] * 10), simulate([])])
    assert (tau.tau, tau.macro, tau.conversations, tau.categories) == (10.0, 10.0, 1, {"math": 10.0})
    with pytest.raises(ValueError, match="no continuation token"):
        summary([talks[1]], [simulate([])])


def random_steps(share, conversations=150, seed=0):
    generator = np.random.default_rng(seed)
    return [simulate(generator.random(60) < share) for _ in range(conversations)]


def test_the_interval_is_the_ratio_estimators_and_repeats():
    steps = random_steps(0.6)
    talks = [conversation(range(60), name=str(index)) for index in range(len(steps))]
    tau = summary(talks, steps)
    assert tau == summary(talks, steps)
    # The delta method's standard error of tokens / steps; tokens are constant here.
    counts = np.array([s.count for s in steps])
    error = tau.tau * counts.std(ddof=1) / counts.mean() / np.sqrt(len(counts))
    assert tau.low == pytest.approx(tau.tau - 1.96 * error, abs=0.4 * error)
    assert tau.high == pytest.approx(tau.tau + 1.96 * error, abs=0.4 * error)


def test_the_paired_difference_is_sharper_than_two_intervals():
    better = random_steps(0.6)
    # The same agreements as `better` has, a few of them lost.
    base, losses = np.random.default_rng(0), np.random.default_rng(5)
    worse = [simulate((base.random(60) < 0.6) & (losses.random(60) < 0.97)) for _ in better]
    found = paired(better, worse)
    talks = [conversation(range(60), name=str(index)) for index in range(len(better))]
    alone = summary(talks, better)
    assert found.low <= found.difference <= found.high
    assert found.high - found.low < 0.6 * (alone.high - alone.low)
    assert found.low > 0
    assert paired(worse, better).difference == pytest.approx(-found.difference)


def test_steps_of_other_conversations_are_refused():
    with pytest.raises(ValueError, match="not those of these conversations"):
        summary([conversation(range(5))], [simulate([True] * 6)])
    with pytest.raises(ValueError, match="same conversations"):
        paired([simulate([True] * 6)], [simulate([True] * 5)])


ROW = {"id": "a", "category": "math", "source": "s", "family": "f", "prompt": [1, 2], "continuation": [3]}


def test_reads_conversations(tmp_path):
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"id": "b"}) + "\n")
    assert read_conversations(path)[1] == Conversation("b", "math", (1, 2), (3,))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[1]", "expected a JSON object"),
        (json.dumps({k: v for k, v in ROW.items() if k != "continuation"}), "'continuation' must be a list"),
        (json.dumps(ROW | {"continuation": [1, True]}), "'continuation' must be a list"),
        (json.dumps(ROW | {"prompt": [-1]}), "'prompt' must be a list"),
        (json.dumps(ROW | {"id": 5}), "'id' must be a string"),
        (json.dumps(ROW), "already used"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"dev\.jsonl, line 2: .*" + reason):
        read_conversations(path)
