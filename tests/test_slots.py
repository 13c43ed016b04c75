"""Slots: what is known of a request, where it is kept, and that a borrowed prefix is left as it was."""

import pytest
import torch
from conftest import small_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.engine import Engine
from drafter.inference import Inference
from drafter.plain import FEW, NewTokens
from drafter.slots import Lease, Slots, common_prefix

DECODER = small_decoder("llama", seed=21)
COUNT, COLUMNS = 3, 16
texts = st.lists(st.integers(0, 1), min_size=1, max_size=COLUMNS)
batches = st.lists(st.lists(texts, min_size=1, max_size=COUNT), min_size=1, max_size=8)


def naive_prefix(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@settings(max_examples=300)
@given(shared=st.lists(st.integers(0, 3), max_size=60), left=texts, right=texts)
def test_common_prefix(shared: list[int], left: list[int], right: list[int]) -> None:
    assert common_prefix(shared + left, shared + right) == naive_prefix(shared + left, shared + right)
    assert common_prefix(shared, shared + right) == len(shared)
    assert common_prefix([], right) == 0


INFERENCE = Inference(DECODER, COLUMNS + 2)
TAIL = 2  # drafted tokens that follow each request; the last of them does not run


def made() -> Slots:
    return Slots(DECODER.config, COUNT, COLUMNS + TAIL, DECODER.head_weight)


def write(slots: Slots, slot: int, length: int, tokens: list[int]) -> None:
    new = NewTokens(*(torch.tensor([value]) for value in (0, len(tokens), length, slot)))
    INFERENCE.hidden(torch.tensor(tokens), INFERENCE.attend(slots.cached, new))


def fresh(tokens: list[int]) -> tuple[torch.Tensor, ...]:
    """Keys and values of a text computed from nothing, [layers, kv_heads, columns, head_dim]."""
    slots = made()
    write(slots, 0, 0, tokens)
    return tuple(part[:, 0, :, : len(tokens)] for part in slots.cached)


def run(slots: Slots, requests: list[list[int]]) -> list[Lease]:
    """One batch through the slots, as the engine does it; its drafts are 0, then 1."""
    leases = slots.lease(requests)
    slots.settle(leases)
    for request, lease in zip(requests, leases, strict=True):
        write(slots, lease.target, lease.reused, [*request[lease.reused :], 0])
    slots.note(leases, requests)
    slots.keep(leases, [[0, 1]] * len(requests))
    return leases


@settings(max_examples=60)
@given(batches=batches)
@torch.inference_mode()
def test_leases_are_sound_and_slots_hold_what_they_say(batches: list[list[list[int]]]) -> None:
    slots = made()
    for requests in batches:
        before, asked = [list(tokens) for tokens in slots.tokens], list(slots.asked)
        leases = run(slots, requests)
        assert len({lease.target for lease in leases}) == len(requests)
        for request, lease in zip(requests, leases, strict=True):
            best = max(naive_prefix(request, tokens) for tokens in before)
            own = before[lease.source]
            assert lease.reused == min(naive_prefix(request, own), len(request) - 1)
            # Less than the most only where its slot's last request is known, and all but a pass's few.
            few = 0 < asked[lease.source] <= naive_prefix(request, own) >= len(request) - FEW
            assert lease.reused == min(best, len(request) - 1) or few
            assert before[lease.source][: lease.reused] == request[: lease.reused]
            assert slots.tokens[lease.target] == [*request, 0]
            assert slots.asked[lease.target] == len(request)
        targets = {lease.target for lease in leases}
        assert all(slots.tokens[s] == before[s] for s in range(COUNT) if s not in targets)
        for slot, tokens in enumerate(slots.tokens):
            if tokens:
                for stored, expected in zip(slots.cached, fresh(tokens), strict=True):
                    torch.testing.assert_close(
                        stored[:, slot, :, : len(tokens)], expected, atol=2e-5, rtol=1e-4
                    )


@torch.inference_mode()
def test_a_growing_conversation_stays_in_its_slot() -> None:
    slots = made()
    first = run(slots, [[1, 2, 3]])[0]
    for end in range(4, 9):
        lease = run(slots, [[1, 2, 3, 4, 5, 6, 7, 8][:end]])[0]
        assert (lease.source, lease.target, lease.reused) == (first.target, first.target, end - 1)


@torch.inference_mode()
def test_what_was_accepted_of_a_draft_is_reused_in_place() -> None:
    slots = made()
    first = run(slots, [[1, 2, 3]])[0]  # the slot holds 1 2 3 0
    assert run(slots, [[1, 2, 3, 0, 7]])[0] == Lease(first.target, 4, first.target)
    assert run(slots, [[1, 2, 3, 0, 7, 5]])[0] == Lease(first.target, 5, first.target)  # 0 was refused
    assert run(slots, [[1, 2, 3, 0, 7, 5, 0, 1, 8]])[0] == Lease(first.target, 7, first.target)


@torch.inference_mode()
def test_a_branch_leaves_the_trunk_alone() -> None:
    slots = made()
    trunk = run(slots, [[1, 2, 3, 4, 5]])[0].target
    stored = slots.cached[0][:, trunk].clone()
    branch = run(slots, [[1, 2, 3, 9, 9]])[0]
    assert (branch.source, branch.reused) == (trunk, 3)
    assert branch.target != trunk
    shorter = run(slots, [[1, 2]])[0]
    assert shorter.target not in (trunk, branch.target)
    assert slots.tokens[trunk] == [1, 2, 3, 4, 5, 0]
    assert torch.equal(slots.cached[0][:, trunk], stored)


@torch.inference_mode()
def test_the_least_recently_used_goes_first() -> None:
    slots = made()
    for word in (10, 20, 30):
        run(slots, [[word] * 3])
    run(slots, [[10] * 4])  # used again: 20 is now the oldest
    run(slots, [[40] * 3])
    assert sorted(tokens[0] for tokens in slots.tokens) == [10, 30, 40]
    slots.forget()
    assert run(slots, [[10] * 4])[0].reused == 0


@torch.inference_mode()
def test_of_equal_matches_the_one_that_ends_there_is_extended() -> None:
    slots = made()
    longer = run(slots, [[1, 2, 3, 9]])[0].target
    shorter = run(slots, [[1, 2, 3]])[0].target
    assert run(slots, [[1, 2, 3, 4]])[0] == Lease(shorter, 3, shorter)
    assert slots.tokens[longer] == [1, 2, 3, 9, 0]


@torch.inference_mode()
def test_two_that_extend_one_slot_part_ways() -> None:
    slots = made()
    origin = run(slots, [[5, 6, 7]])[0].target
    leases = run(slots, [[5, 6, 7, 8], [5, 6, 7, 9]])
    assert [lease.reused for lease in leases] == [3, 3]
    assert [lease.source for lease in leases] == [origin, origin]
    assert leases[0].target == origin != leases[1].target


def test_an_engine_without_slots_only_generates() -> None:
    engine = Engine(DECODER, 32)
    assert engine.slots is None
    with pytest.raises(RuntimeError, match="slots"):
        engine.draft([[1]])
