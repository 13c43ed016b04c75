"""What the server counts, in Prometheus' terms."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
ROWS = (1, 2, 4, 8, 16, 24, 32, 64)


class Reuse(Protocol):
    """What slots know of their use."""

    hits: int
    reused: int


class Watched(Protocol):
    """What is asked of an engine."""

    @property
    def mode(self) -> str:
        """How drafts are made."""

    @property
    def slots(self) -> Reuse | None:
        """Its slots."""


class Metrics:
    """Counters and histograms of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, open files, when the process started
        self.requests = Counter(
            "drafter_requests", "Drafting requests by outcome", ["outcome"], registry=self.registry
        )
        self.failures = Counter(
            "drafter_failures",
            "Faults inside, by kind: steps that failed (out_of_memory, device, exception), requests without "
            "a draft (timeout, stopped), handlers (server)",
            ["kind"], registry=self.registry,
        )
        self.empty_drafts = Counter(
            "drafter_empty_drafts", "Valid requests answered with an empty draft", registry=self.registry
        )
        self.batch_rows = Histogram(
            "drafter_batch_rows", "Requests drafted in one step", buckets=ROWS, registry=self.registry
        )
        self.queue_seconds = Histogram(
            "drafter_queue_seconds", "From a request's arrival to the start of its step", buckets=SECONDS,
            registry=self.registry,
        )
        self.draft_seconds = Histogram(
            "drafter_draft_seconds", "One step: drafting for a batch", buckets=SECONDS, registry=self.registry
        )

    def watch(self, engine: Watched) -> None:
        """Count from here on what an engine reuses, too, and tell how it drafts."""
        self.registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Watched) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        mode, slots = self.engine.mode, self.engine.slots
        yield InfoMetricFamily("drafter_engine", "From graphs, kernels or plain torch", {"mode": mode})
        if slots is not None:
            yield CounterMetricFamily("drafter_prefix_hits", "Requests with a cached prefix", slots.hits)
            yield CounterMetricFamily("drafter_reused_tokens", "Tokens that were not run again", slots.reused)
