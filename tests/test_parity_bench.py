"""bench-parity: it is content with a sound engine, and sees one that reads a stale slot."""

import random

import pytest
from conftest import small_config, small_decoder

from benchmarks.parity import EPSILON, TAU_SHARE, compare
from drafter.engine import Engine
from drafter.replay import Conversation
from drafter.slots import Slots

BATCH, VOCAB = 3, small_config().vocab_size


def compared() -> dict[str, object]:
    """Compare an engine over conversations, more of them than slots, with the same weights uncached.

    Every continuation is the decoder's own at most positions, so that there is a tau to differ in.
    """
    decoder, number = small_decoder(), random.Random(3)
    alone = Engine(small_decoder(), context_tokens=128, slots=1)
    conversations = []
    for index in range(8):
        text = prompt = [number.randrange(VOCAB) for _ in range(number.randint(4, 30))]
        for _ in range(4):
            text = [*text, *alone.draft([text], 5)[0], number.randrange(VOCAB)]
        conversations.append(Conversation(str(index), "test", tuple(prompt), tuple(text[len(prompt) :])))
    engine = Engine(small_decoder(), context_tokens=128, slots=BATCH)
    return compare(engine, decoder, conversations, BATCH)


def test_a_sound_engine_passes():
    found = compared()
    assert found["positions"] == 8 * 24
    assert (found["beyond_epsilon"], found["agree_share"], found["tau_difference_share"]) == (0, 1, 0)
    assert found["tau_replayed"] > 2


def test_a_stale_slot_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Slots that note one another's conversation as theirs, as if a copy had gone to the wrong place."""
    keep = Slots.keep

    def kept(slots, leases, drafts):
        keep(slots, leases, drafts)
        if len(leases) > 1:
            one, other = leases[0].target, leases[1].target
            for noted in (slots.tokens, slots.asked):
                noted[one], noted[other] = noted[other], noted[one]

    monkeypatch.setattr(Slots, "keep", kept)
    found = compared()
    assert found["beyond_epsilon"] > 0 and found["largest_margin_at_a_difference"] > EPSILON
    assert abs(found["tau_difference_share"]) > TAU_SHARE
