"""What the server counts, in Prometheus' terms."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
ROWS = (1, 2, 4, 8, 16, 24, 32, 64)


class Metrics:
    """Counters and histograms of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "drafter_requests", "Drafting requests by outcome", ["outcome"], registry=self.registry
        )
        self.failures = Counter(
            "drafter_failures", "Faults inside, by kind: each cost a draft, none an answer", ["kind"],
            registry=self.registry,
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

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)
