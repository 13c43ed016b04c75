"""What a batcher may do at once and for how long, and how what fails is sorted."""

from dataclasses import dataclass

from drafter import logs

MEMORY, DEVICE, EXCEPTION = "out_of_memory", "device", "exception"


@dataclass(frozen=True)
class Limits:
    """How much at once, and how long.

    Attributes:
        draft_tokens: ids a draft has.
        max_batch: requests of one step.
        new_tokens: tokens that one step may have to read if it is of more than one request; 0 for any number.
            So long prompts that come together are answered one after the other, and not all too late.
        max_waiting: requests in flight; one more is refused. Eight times what the contract sends at once, so
            no client that keeps it is ever refused, and few enough that the last is drafted in time.
        linger_s: a step waits at least this long for one more request, anew after each that comes ...
        linger_share: ... or this share of the last step's time, where that is longer ...
        linger_most_s: ... but no longer than this ...
        linger_times: ... and no more often than this.
        stall_s: a step that takes longer will not come back.
        probe_s: how often a broken engine is tried, while its requests wait.
        broken_s: an engine that fails for this long ...
        broken_rounds: ... and this often in a row is given up; one whose device is lost, at once.
        barren: so many requests in a row without a draft end it, too, though it can draft the probe.
    """

    draft_tokens: int = 16
    max_batch: int = 32
    new_tokens: int = 0
    max_waiting: int = 256
    linger_s: float = 0.002
    linger_share: float = 0.04
    linger_most_s: float = 0.05
    linger_times: int = 5
    stall_s: float = 60.0
    probe_s: float = 1.0
    broken_s: float = 3.0
    broken_rounds: int = 5
    barren: int = 64


@dataclass(frozen=True)
class Fault:
    """Why a step failed: MEMORY, DEVICE or EXCEPTION, and in which words.

    Not the exception itself: its traceback would keep the failed step's tensors in memory while parts of it
    are tried again.
    """

    kind: str
    error: str

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """Sort an exception of the engine. A device that reports an error may be lost for this process."""
        words = f"{type(error).__name__}: {error}".lower()
        kind = EXCEPTION
        if any(sign in words for sign in ("memoryerror", "out of memory", "allocate memory")):
            kind = MEMORY
        elif any(sign in words for sign in ("acceleratorerror", "cuda error", "[cuda]")):
            kind = DEVICE
        return cls(kind, logs.described(error))
