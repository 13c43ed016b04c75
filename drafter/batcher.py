"""The batcher: gathers the requests in flight into one drafting step, and keeps a fault to itself."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from drafter import logs
from drafter.limits import DEVICE, Fault, Limits
from drafter.metrics import Metrics

DraftBatch = Callable[[list[list[int]], int], list[list[int]]]
PROBE = [0]  # a request that a sound engine can always draft for


class BusyError(Exception):
    """As many requests as may be are in flight already."""


@dataclass(eq=False)
class _Pending:
    tokens: list[int]
    draft: asyncio.Future[list[int]]
    since: float

    @property
    def empty(self) -> bool:
        """Whether it was answered with nothing."""
        return self.draft.done() and not self.draft.cancelled() and not self.draft.result()

    def answer(self, draft: list[int]) -> None:
        # It may be done already: its client left, or its time was up.
        if not self.draft.done():
            self.draft.set_result(draft)


class Batcher:
    """One task that drafts for all that wait, in one worker thread, while the next ones gather.

    Args:
        draft: `Engine.draft`: (requests, count) -> a draft for each.
        limits: see Limits.
        metrics: what is counted.
        unread: how many of a request's tokens a step would have to read; the rest was read before.
    """

    def __init__(self, draft: DraftBatch, limits: Limits, metrics: Metrics,
                 unread: Callable[[list[int]], int] = len) -> None:
        self.limits = limits
        self.metrics = metrics
        self.given_up = asyncio.Event()
        self._draft = draft
        self._unread = unread
        self._queue: deque[_Pending] = deque()
        self._came = asyncio.Event()
        self._waiting: set[_Pending] = set()  # the queue's and those in a step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._failing_since = 0.0
        self._device_lost = False
        self._barren = 0
        self._step_since: float | None = None
        self._last_step_s = 0.0

    def start(self) -> None:
        """Start the task; it belongs to no web framework, so that only `stop` ends it."""
        self._task = asyncio.create_task(self._run(), name="batcher")

    def stop(self) -> None:
        """End the task and answer all that still wait with an empty draft."""
        if self._task is not None:
            self._task.cancel()
        self._abandon()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def alive(self) -> bool:
        """Whether the task runs."""
        return self._task is not None and not self._task.done()

    @property
    def busy(self) -> bool:
        """Whether the worker thread is inside a step."""
        return self._step_since is not None

    def ready(self, patience_s: float) -> bool:
        """Say whether the next request can expect a draft: alive, not failing, no step over `patience_s`."""
        late = self._step_since is not None and time.monotonic() - self._step_since > patience_s
        return self.alive and self._failures == 0 and not late

    async def submit(self, tokens: list[int], timeout_s: float) -> list[int]:
        """Return a draft for one request; an empty one after `timeout_s` seconds or when drafting failed.

        Raises:
            BusyError: `max_waiting` requests are in flight.
        """
        if len(self._waiting) >= self.limits.max_waiting:
            raise BusyError
        if not self.alive:
            self.metrics.failures.labels("stopped").inc()
            return []
        pending = _Pending(tokens, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.add(pending)
        self._queue.append(pending)
        self._came.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.draft
        except TimeoutError:
            self.metrics.failures.labels("timeout").inc()
            logs.event(logging.ERROR, "timeout", waited_s=round(time.monotonic() - pending.since, 3))
            return []
        finally:
            pending.draft.cancel()  # nothing is drafted for a client that is gone
            self._waiting.discard(pending)
            if pending in self._queue:
                self._queue.remove(pending)

    async def _run(self) -> None:
        try:
            while not self._hopeless():
                if self._failures:
                    # Who comes meanwhile waits: a broken engine would answer all with nothing, and fast.
                    await asyncio.sleep(self.limits.probe_s)
                    await self._probe()
                elif batch := await self._gather():
                    await self._answer(batch)
            logs.event(logging.CRITICAL, "given up", failures=self._failures, device_lost=self._device_lost,
                       barren=self._barren)
        except Exception as error:
            logs.event(logging.CRITICAL, "batcher ended", error=logs.described(error))
        finally:
            self.given_up.set()
            self._abandon()

    def _hopeless(self) -> bool:
        lasting = time.monotonic() - self._failing_since >= self.limits.broken_s
        broken = self._failures >= self.limits.broken_rounds and lasting
        return self._device_lost or broken or self._barren >= self.limits.barren

    def _abandon(self) -> None:
        for pending in self._waiting:
            if not pending.draft.done():
                self.metrics.failures.labels("stopped").inc()
                pending.answer([])

    async def _gather(self) -> list[_Pending]:
        """Wait for requests and take up to a batch of them; none if all of them left meanwhile."""
        await self._came.wait()
        # Clients that were answered together come back together: wait while they do. Otherwise two halves
        # of them take turns for ever, each waiting for the other's step.
        for _ in range(self.limits.linger_times):
            seen = len(self._queue)
            if seen >= self.limits.max_batch:
                break
            share_s = min(self.limits.linger_share * self._last_step_s, self.limits.linger_most_s)
            await asyncio.sleep(max(self.limits.linger_s, share_s))
            if len(self._queue) <= seen:
                break
        batch = self._taken()
        if not self._queue:
            self._came.clear()
        return batch

    def _taken(self) -> list[_Pending]:
        """Take the first that waits, and of those behind it all that there is room for."""
        batch: list[_Pending] = []
        passed: list[_Pending] = []
        room = self.limits.new_tokens
        while self._queue and len(batch) < self.limits.max_batch:
            pending = self._queue.popleft()
            if pending.draft.done():
                continue
            size = self._unread(pending.tokens) if self.limits.new_tokens else 0
            if batch and size > room:
                passed.append(pending)
            else:
                batch.append(pending)
                room -= size
        self._queue.extendleft(reversed(passed))
        return batch

    async def _answer(self, batch: list[_Pending]) -> None:
        now = time.monotonic()
        for pending in batch:
            self.metrics.queue_seconds.observe(now - pending.since)
        self.metrics.batch_rows.observe(len(batch))
        fault = await self._answer_or_halve(batch)
        empty = sum(pending.empty for pending in batch)
        self._barren = self._barren + empty if empty == len(batch) else 0
        if fault is not None:
            logs.event(logging.ERROR, "step failed", kind=fault.kind, error=fault.error, requests=len(batch),
                       empty=empty)

    async def _answer_or_halve(self, batch: list[_Pending]) -> Fault | None:
        """Draft for a batch; where that fails, for its halves: only what cannot be drafted goes without."""
        drafts = await self._step([pending.tokens for pending in batch])
        if not isinstance(drafts, Fault):
            for pending, draft in zip(batch, drafts, strict=True):
                pending.answer(draft)
            return None
        if len(batch) == 1:
            await self._probe()  # was it the request or the engine?
            batch[0].answer([])
            return drafts
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            if self._failures == 0:
                await self._answer_or_halve(half)
            else:  # a broken engine is not tried once more for each
                for pending in half:
                    pending.answer([])
        return drafts

    async def _probe(self) -> None:
        fault = await self._step([PROBE])
        if isinstance(fault, Fault):
            if self._failures == 0:
                self._failing_since = time.monotonic()
            self._failures += 1
            self._device_lost = fault.kind == DEVICE

    async def _step(self, requests: list[list[int]]) -> list[list[int]] | Fault:
        """Draft in the worker thread; a step that stalls raises."""
        self._step_since = started = time.monotonic()
        step = asyncio.get_running_loop().run_in_executor(self._thread, self._drafted, requests)
        done, _ = await asyncio.wait({step}, timeout=self.limits.stall_s)
        if not done:
            raise RuntimeError(f"a step of {len(requests)} requests took over {self.limits.stall_s:.0f} s")
        self._step_since = None
        self._last_step_s = time.monotonic() - started
        self.metrics.draft_seconds.observe(self._last_step_s)
        drafts = step.result()
        if isinstance(drafts, Fault):
            self.metrics.failures.labels(drafts.kind).inc()
        else:
            self._failures = 0
        return drafts

    def _drafted(self, requests: list[list[int]]) -> list[list[int]] | Fault:
        try:
            drafts = self._draft(requests, self.limits.draft_tokens)
            if len(drafts) != len(requests):
                raise RuntimeError(f"{len(drafts)} drafts for {len(requests)} requests")
            return drafts
        except BaseException as error:  # even one that means to end the process
            return Fault.of(error)
