"""The batcher: gathers the requests in flight into one drafting step, and keeps a fault to itself."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from drafter import logs
from drafter.metrics import Metrics

DraftBatch = Callable[[list[list[int]], int], list[list[int]]]
PROBE = [0]  # a request that a sound engine can always draft for


@dataclass(frozen=True)
class Limits:
    """How much at once, and how long.

    Attributes:
        draft_tokens: ids a draft has.
        max_batch: requests of one step.
        max_waiting: requests in flight; more of them wait to be taken in.
        linger_s: a step waits at least this long for one more request, anew after each that comes ...
        linger_share: ... or this share of the last step's time, where that is longer ...
        linger_times: ... but no more often than this.
        stall_s: a step that takes longer will not come back.
        probe_s: how often a broken engine is tried while no request comes.
        broken_s: an engine that fails for this long ...
        broken_rounds: ... and this often in a row is given up.
    """

    draft_tokens: int = 16
    max_batch: int = 32
    max_waiting: int = 256
    linger_s: float = 0.002
    linger_share: float = 0.04
    linger_times: int = 5
    stall_s: float = 200.0
    probe_s: float = 1.0
    broken_s: float = 3.0
    broken_rounds: int = 5


@dataclass(eq=False)
class _Pending:
    tokens: list[int]
    draft: asyncio.Future[list[int]]
    since: float

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
    """

    def __init__(self, draft: DraftBatch, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self.given_up = asyncio.Event()
        self._draft = draft
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
        self._room = asyncio.Semaphore(limits.max_waiting)
        self._waiting: set[_Pending] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._failing_since = 0.0
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
        """Return a draft for one request; an empty one after `timeout_s` seconds or when drafting failed."""
        pending = _Pending(tokens, asyncio.get_running_loop().create_future(), time.monotonic())
        try:
            async with asyncio.timeout(timeout_s), self._room:
                if not self.alive:
                    self.metrics.failures.labels("stopped").inc()
                    return []
                self._waiting.add(pending)
                self._queue.put_nowait(pending)
                return await pending.draft
        except TimeoutError:
            self.metrics.failures.labels("timeout").inc()
            logs.event(logging.ERROR, "timeout", waited_s=round(time.monotonic() - pending.since, 3))
            return []
        finally:
            self._waiting.discard(pending)
            pending.draft.cancel()  # nothing is drafted for a client that is gone

    async def _run(self) -> None:
        try:
            while not self._hopeless():
                batch = await self._gather()
                if batch:
                    await self._answer(batch)
                elif self._failures:
                    await self._probe()
            logs.event(logging.CRITICAL, "given up", failures=self._failures)
        except Exception as error:
            logs.event(logging.CRITICAL, "batcher ended", error=logs.described(error))
        finally:
            self.given_up.set()
            self._abandon()

    def _hopeless(self) -> bool:
        lasting = time.monotonic() - self._failing_since >= self.limits.broken_s
        return self._failures >= self.limits.broken_rounds and lasting

    def _abandon(self) -> None:
        for pending in self._waiting:
            self.metrics.failures.labels("stopped").inc()
            pending.answer([])

    async def _gather(self) -> list[_Pending]:
        """Take what waits, up to a batch; nothing when a failing engine should be probed instead."""
        try:
            async with asyncio.timeout(self.limits.probe_s if self._failures else None):
                batch = [await self._queue.get()]
        except TimeoutError:
            return []
        missing = self.limits.max_batch - 1
        # Clients that were answered together come back together: wait while they do. Otherwise two halves
        # of them take turns for ever, each waiting for the other's step.
        for _ in range(self.limits.linger_times):
            seen = self._queue.qsize()
            if seen >= missing:
                break
            await asyncio.sleep(max(self.limits.linger_s, self.limits.linger_share * self._last_step_s))
            if self._queue.qsize() == seen:
                break
        with contextlib.suppress(asyncio.QueueEmpty):
            while len(batch) < self.limits.max_batch:
                batch.append(self._queue.get_nowait())
        return [pending for pending in batch if not pending.draft.done()]

    async def _answer(self, batch: list[_Pending]) -> None:
        now = time.monotonic()
        for pending in batch:
            self.metrics.queue_seconds.observe(now - pending.since)
        self.metrics.batch_rows.observe(len(batch))
        drafts = await self._step([pending.tokens for pending in batch])
        if isinstance(drafts, BaseException):
            await self._answer_alone(batch, drafts)
            return
        for pending, draft in zip(batch, drafts, strict=True):
            pending.answer(draft)

    async def _answer_alone(self, batch: list[_Pending], fault: BaseException) -> None:
        """Try each request of a failed step by itself, so that only what cannot be drafted goes without."""
        self.metrics.failures.labels("step").inc()
        failed, sound = 0, True
        for pending in batch:
            drafts = await self._step([pending.tokens]) if sound else fault
            if isinstance(drafts, BaseException):
                failed += 1
                self.metrics.failures.labels("request").inc()
                pending.answer([])
                # Was it the request or the engine? A broken engine is not tried once more for each.
                sound = sound and await self._probe()
            else:
                pending.answer(drafts[0])
        logs.event(logging.ERROR, "step failed", error=logs.described(fault), requests=len(batch),
                   failed_alone=failed)

    async def _probe(self) -> bool:
        if not isinstance(await self._step([PROBE]), BaseException):
            return True
        if self._failures == 0:
            self._failing_since = time.monotonic()
        self._failures += 1
        return False

    async def _step(self, requests: list[list[int]]) -> list[list[int]] | BaseException:
        """Draft in the worker thread; return the drafts or what was raised. A stalled step raises."""
        self._step_since = started = time.monotonic()
        step = asyncio.get_running_loop().run_in_executor(self._thread, self._draft_checked, requests)
        step.add_done_callback(_seen)
        done, _ = await asyncio.wait({step}, timeout=self.limits.stall_s)
        if not done:
            raise RuntimeError(f"a step of {len(requests)} requests took over {self.limits.stall_s:.0f} s")
        self._step_since = None
        self._last_step_s = time.monotonic() - started
        self.metrics.draft_seconds.observe(self._last_step_s)
        if (fault := step.exception()) is not None:
            return fault
        self._failures = 0
        return step.result()

    def _draft_checked(self, requests: list[list[int]]) -> list[list[int]]:
        drafts = self._draft(requests, self.limits.draft_tokens)
        if len(drafts) != len(requests):
            raise RuntimeError(f"{len(drafts)} drafts for {len(requests)} requests")
        return drafts


def _seen(step: asyncio.Future[list[list[int]]]) -> None:
    # A step that outlives its batcher has nobody to take its exception; asyncio would complain on stderr.
    if not step.cancelled():
        step.exception()
