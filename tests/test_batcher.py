"""The batcher in process: what is gathered, and how faults stay where they belong."""

import asyncio
import json
import threading
import time
import weakref
from dataclasses import replace

import pytest

from drafter import logs
from drafter.batcher import PROBE, Batcher, BusyError
from drafter.limits import Limits
from drafter.metrics import Metrics

QUICK = Limits(draft_tokens=4, max_batch=8, probe_s=0.02, broken_s=0.2, broken_rounds=3)


class Model:
    """Drafts the request's last token, counted up; keeps what it was asked for."""

    def __init__(self, fault=lambda model, requests: None):
        self.batches = []
        self.fault = fault
        self.gate = threading.Event()
        self.gate.set()

    def draft(self, requests, count):
        self.batches.append([list(request) for request in requests])
        assert self.gate.wait(10)
        self.fault(self, requests)
        return [[request[-1] + step for step in range(1, count + 1)] for request in requests]


def expected(tokens, count=4):
    return [tokens[-1] + step for step in range(1, count + 1)]


def count_of(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels) or 0.0


def trial(scenario, fault=lambda model, requests: None, limits=QUICK):
    """Run a scenario(model, batcher) with a started batcher."""

    async def run():
        model = Model(fault)
        batcher = Batcher(model.draft, limits, Metrics())
        batcher.start()
        try:
            await scenario(model, batcher)
        finally:
            model.gate.set()
            batcher.stop()

    asyncio.run(asyncio.wait_for(run(), 20))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def raising(model, requests):
    raise RuntimeError("out of order")


def test_what_comes_while_a_step_runs_is_drafted_in_the_next():
    async def scenario(model, batcher):
        model.gate.clear()
        first = asyncio.create_task(batcher.submit([1], 10))
        await until(lambda: model.batches)
        rest = [asyncio.create_task(batcher.submit([10 * row], 10)) for row in range(1, 12)]
        await asyncio.sleep(0)
        model.gate.set()
        assert await first == expected([1])
        assert await asyncio.gather(*rest) == [expected([10 * row]) for row in range(1, 12)]
        assert [len(batch) for batch in model.batches] == [1, 8, 3]

    trial(scenario)


def test_requests_that_come_together_share_the_first_step():
    async def scenario(model, batcher):
        await asyncio.gather(*(batcher.submit([row], 10) for row in range(6)))
        assert [len(batch) for batch in model.batches] == [6]
        assert count_of(batcher.metrics, "drafter_batch_rows_count") == 1
        assert count_of(batcher.metrics, "drafter_queue_seconds_count") == 6

    trial(scenario)


def test_the_time_of_each_step_is_counted():
    def slow(model, requests):
        time.sleep(0.05)

    async def scenario(model, batcher):
        await batcher.submit([1], 10)
        await batcher.submit([2], 10)
        assert count_of(batcher.metrics, "drafter_draft_seconds_count") == 2
        assert 0.1 <= count_of(batcher.metrics, "drafter_draft_seconds_sum") < 5

    trial(scenario, slow)


def batches_of(requests, limits, unread=len):
    """Which batches are made of requests that come while a step runs."""
    found = []

    async def run():
        model = Model()
        batcher = Batcher(model.draft, limits, Metrics(), unread)
        batcher.start()
        model.gate.clear()
        first = asyncio.create_task(batcher.submit([0], 10))
        await until(lambda: model.batches)
        rest = [asyncio.create_task(batcher.submit(request, 10)) for request in requests]
        await asyncio.sleep(0)
        model.gate.set()
        assert await asyncio.gather(first, *rest) == [expected(request) for request in ([0], *requests)]
        found.extend(model.batches[1:])
        batcher.stop()

    asyncio.run(asyncio.wait_for(run(), 20))
    return found


def test_long_prompts_take_turns_and_short_ones_do_not_wait_behind_them():
    longest, second, third = [1] * 90, [2] * 80, [3] * 30
    short = [[row] * 3 for row in range(4, 8)]
    requests = [longest, short[0], second, short[1], third, *short[2:]]
    limits = Limits(draft_tokens=4, max_batch=8, new_tokens=100)
    turns = [[longest, *short[:3]], [second, short[3]], [third]]
    assert batches_of(requests, limits) == turns
    assert batches_of([[1] * 500, *short], limits) == [[[1] * 500], short]  # a step has one request at least
    assert batches_of(requests, Limits(draft_tokens=4, max_batch=8)) == [requests]


def test_who_was_passed_over_comes_first_in_the_next_step():
    longest, second, short = [1] * 90, [2] * 80, [[row] * 3 for row in range(4, 7)]
    limits = Limits(draft_tokens=4, max_batch=2, new_tokens=100)
    turns = [[longest, short[0]], [second, short[1]], [short[2]]]
    assert batches_of([longest, second, *short], limits) == turns


def test_what_was_read_before_is_no_reason_to_take_turns():
    talks = [[row] * 200 for row in range(32)]
    limits = Limits(draft_tokens=4, new_tokens=32 * 17)
    assert batches_of(talks, limits, unread=lambda request: 17) == [talks]


def test_the_wait_for_one_more_request_is_short_however_long_the_last_step_was(monkeypatch):
    pauses, sleep = [], asyncio.sleep

    async def noted(seconds):
        pauses.append(seconds)
        await sleep(0)

    async def scenario(model, batcher):
        batcher._last_step_s = 100.0
        monkeypatch.setattr(asyncio, "sleep", noted)
        await batcher.submit([1], 10)
        assert pauses == [0.05]

    trial(scenario)


def test_one_fault_costs_nobody_the_draft(capfd):
    def once(model, requests):
        if len(model.batches) == 1:
            raise RuntimeError("a passing fault")

    async def scenario(model, batcher):
        drafts = await asyncio.gather(*(batcher.submit([row], 10) for row in range(8)))
        assert drafts == [expected([row]) for row in range(8)]
        assert await batcher.submit([9], 10) == expected([9])
        assert batcher.ready(50)
        assert count_of(batcher.metrics, "drafter_failures_total", kind="exception") == 1

    logs.configure("info")
    trial(scenario, once, replace(QUICK, probe_s=60))  # longer than the trial may take
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["step failed"]
    assert (lines[0]["kind"], lines[0]["requests"], lines[0]["empty"]) == ("exception", 8, 0)
    assert "a passing fault" in lines[0]["error"]


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def test_out_of_memory_halves_the_batch_and_lets_go_of_what_the_step_held(capfd):
    class Tensor:
        pass

    held = []

    def short(model, requests):
        assert all(tensor() is None for tensor in held)
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        if len(requests) > 2 or [6] in requests:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async def scenario(model, batcher):
        drafts = await asyncio.gather(*(batcher.submit([row], 10) for row in range(8)))
        assert drafts == [[] if row == 6 else expected([row]) for row in range(8)]
        assert [len(batch) for batch in model.batches] == [8, 4, 2, 2, 4, 2, 2, 1, 1, 1]
        assert model.batches[-2] == [PROBE]
        assert count_of(batcher.metrics, "drafter_failures_total", kind="out_of_memory") == 5
        assert batcher.ready(50)

    logs.configure("info")
    trial(scenario, short)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["event"], line["kind"], line["empty"]) for line in lines] == [
        ("step failed", "out_of_memory", 1)
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out_of_memory"),
        (OutOfMemoryError("CUDA out of memory."), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (ValueError("5 requests at once, but there are 4 slots"), "exception"),
        (SystemExit(3), "exception"),
    ],
)
def test_faults_are_counted_by_kind(error, kind):
    def once(model, requests):
        if len(model.batches) == 1:
            raise error

    async def scenario(model, batcher):
        assert await batcher.submit([1], 10) == []
        assert await batcher.submit([1], 10) == expected([1])
        assert count_of(batcher.metrics, "drafter_failures_total", kind=kind) == 1

    trial(scenario, once)


def test_a_lost_device_is_given_up_at_once():
    def lost(model, requests):
        raise RuntimeError("CUDA error: unspecified launch failure")

    async def scenario(model, batcher):
        assert await batcher.submit([1], 10) == []
        await asyncio.wait_for(batcher.given_up.wait(), 5)
        assert model.batches == [[[1]], [PROBE]]

    trial(scenario, lost, Limits(probe_s=60, broken_s=60))


def test_an_engine_that_drafts_nothing_but_the_probe_is_given_up():
    def barren(model, requests):
        if requests != [PROBE] and [99] not in requests:
            raise ValueError("not these")

    async def scenario(model, batcher):
        for row in (1, 2, 3, 99, 5, 6, 7):
            assert await batcher.submit([row], 10) == ([] if row != 99 else expected([99]))
        assert batcher.ready(50)
        assert await batcher.submit([8], 10) == []
        await asyncio.wait_for(batcher.given_up.wait(), 5)

    trial(scenario, barren, Limits(draft_tokens=4, barren=4))


def test_a_request_that_cannot_be_drafted_goes_without_and_its_neighbours_do_not():
    def poisoned(model, requests):
        if [13] in requests:
            raise ValueError("this one")

    async def scenario(model, batcher):
        rows = [11, 12, 13, 14]
        for _ in range(4):
            drafts = await asyncio.gather(*(batcher.submit([row], 10) for row in rows))
            assert drafts == [[] if row == 13 else expected([row]) for row in rows]
            assert batcher.ready(50)
        # Alone and again and again it still does not make the engine look broken.
        for _ in range(QUICK.broken_rounds + 2):
            assert await batcher.submit([13], 10) == []
        assert batcher.ready(50) and batcher.alive

    trial(scenario, poisoned, Limits(draft_tokens=4, max_batch=8, broken_s=0, broken_rounds=1))


def test_a_fault_that_lasts_is_answered_at_once_seen_and_given_up(capfd):
    async def scenario(model, batcher):
        started = time.monotonic()
        drafts = await asyncio.gather(*(batcher.submit([row], 10) for row in range(8)))
        assert drafts == [[]] * 8
        # The step, its halves down to one request, the probe: no more tries of a broken engine.
        assert [len(batch) for batch in model.batches[:5]] == [8, 4, 2, 1, 1]
        assert not batcher.ready(50) and batcher.alive
        # Who comes now waits for the engine, or for its end.
        assert await batcher.submit([1], 10) == []
        assert batcher.given_up.is_set() and model.batches[-1] == [PROBE]
        await batcher.given_up.wait()
        assert time.monotonic() - started < 5
        await until(lambda: not batcher.alive)
        assert await batcher.submit([1], 10) == []

    logs.configure("info")
    trial(scenario, raising)
    events = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert events == ["step failed", "given up"]


@pytest.mark.parametrize(("seconds", "rounds"), [(60, 2), (0, 5)])
def test_an_engine_that_recovers_is_ready_again_without_a_request(seconds, rounds):
    def broken_for_a_while(model, requests):
        if len(model.batches) < 5:
            raising(model, requests)

    async def scenario(model, batcher):
        assert await batcher.submit([1], 10) == []
        assert not batcher.ready(50)
        assert await batcher.submit([2], 10) == expected([2])  # it waited
        assert batcher.ready(50)
        assert model.batches == [[[1]], [PROBE], [PROBE], [PROBE], [PROBE], [[2]]]

    limits = Limits(draft_tokens=4, probe_s=0.01, broken_s=seconds, broken_rounds=rounds)
    trial(scenario, broken_for_a_while, limits)


def test_clients_that_leave_do_not_make_an_engine_look_barren():
    async def scenario(model, batcher):
        for step in range(1, 4):
            model.gate.clear()
            left = asyncio.create_task(batcher.submit([1], 10))
            await until(lambda step=step: len(model.batches) == step)
            left.cancel()
            model.gate.set()
            await until(lambda: not batcher.busy)
        assert await batcher.submit([2], 10) == expected([2])

    trial(scenario, limits=replace(QUICK, barren=2))


def test_what_is_left_at_the_end_is_counted_once():
    async def run():
        model = Model()
        batcher = Batcher(model.draft, QUICK, Metrics())
        batcher.start()
        model.gate.clear()
        waiting = [asyncio.create_task(batcher.submit([row], 10)) for row in range(3)]
        await until(lambda: model.batches)
        batcher.stop()
        await until(lambda: not batcher.alive)
        assert await asyncio.gather(*waiting) == [[]] * 3
        assert count_of(batcher.metrics, "drafter_failures_total", kind="stopped") == 3
        model.gate.set()

    asyncio.run(run())


@pytest.mark.parametrize("answer", [[], None, [[1], [2]]])
def test_an_engine_that_answers_the_wrong_number_is_a_fault(answer):
    async def run():
        batcher = Batcher(lambda requests, count: answer, QUICK, Metrics())
        batcher.start()
        assert await batcher.submit([1], 10) == []
        assert count_of(batcher.metrics, "drafter_failures_total", kind="exception") == 2  # and the probe
        batcher.stop()

    asyncio.run(run())


def test_no_request_waits_longer_than_it_may():
    async def scenario(model, batcher):
        model.gate.clear()
        started = time.monotonic()
        first, second = (asyncio.create_task(batcher.submit([row], 0.2)) for row in (1, 2))
        assert await first == await second == []
        assert 0.2 <= time.monotonic() - started < 10
        assert count_of(batcher.metrics, "drafter_failures_total", kind="timeout") == 2
        assert not batcher.ready(0.1) and batcher.alive
        model.gate.set()
        assert await batcher.submit([3], 10) == expected([3])
        assert batcher.ready(0.1)

    trial(scenario)


def test_a_stalled_step_is_given_up_and_nobody_is_left_waiting():
    async def scenario(model, batcher):
        model.gate.clear()
        assert await asyncio.gather(*(batcher.submit([row], 10) for row in range(3))) == [[]] * 3
        await batcher.given_up.wait()
        assert batcher.busy

    trial(scenario, limits=Limits(stall_s=0.1))


def test_nothing_is_drafted_for_a_client_that_left():
    async def scenario(model, batcher):
        model.gate.clear()
        first = asyncio.create_task(batcher.submit([1], 10))
        await until(lambda: model.batches)
        gone, stays = (asyncio.create_task(batcher.submit([row], 10)) for row in (2, 3))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        model.gate.set()
        assert (await first, await stays) == (expected([1]), expected([3]))
        assert model.batches == [[[1]], [[3]]]

    trial(scenario)


def test_more_than_may_be_in_flight_are_refused_and_taken_again_as_room_comes():
    async def scenario(model, batcher):
        model.gate.clear()
        waiting = [asyncio.create_task(batcher.submit([row], 10)) for row in range(12)]
        await until(lambda: model.batches)
        with pytest.raises(BusyError):
            await batcher.submit([12], 10)
        waiting[11].cancel()
        await asyncio.sleep(0)
        again = asyncio.create_task(batcher.submit([12], 10))
        await asyncio.sleep(0)
        model.gate.set()
        drafts = await asyncio.gather(*waiting[:11], again)
        assert drafts == [expected([row]) for row in [*range(11), 12]]
        assert await batcher.submit([13], 10) == expected([13])

    trial(scenario, limits=Limits(draft_tokens=4, max_batch=8, max_waiting=12))


def test_stopping_answers_what_waits():
    async def scenario(model, batcher):
        model.gate.clear()
        waiting = [asyncio.create_task(batcher.submit([row], 10)) for row in range(20)]
        await until(lambda: model.batches)
        batcher.stop()
        assert await asyncio.gather(*waiting) == [[]] * 20
        assert await batcher.submit([1], 10) == []
        await until(lambda: not batcher.alive)

    trial(scenario)


@pytest.mark.parametrize(("share", "together"), [(0.3, True), (0.0, False)])
def test_halves_that_take_turns_come_together(share, together):
    """Clients that need longer to come back than the shortest linger still end up in one step."""

    def slow(model, requests):
        time.sleep(0.2)

    async def scenario(model, batcher):
        async def client(number):
            for turn in range(8):
                await batcher.submit([number, turn], 10)
                await asyncio.sleep(0.01)

        first = [asyncio.create_task(client(number)) for number in range(4)]
        await asyncio.sleep(0.1)
        second = [asyncio.create_task(client(number)) for number in range(4, 8)]
        await asyncio.gather(*first, *second)
        sizes = [len(batch) for batch in model.batches[2:7]]
        assert (sizes == [8] * 5) == together

    trial(scenario, slow, Limits(max_batch=8, linger_s=0.001, linger_share=share))
