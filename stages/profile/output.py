"""The sections on what is shipped: its bytes, its server, and its rehearsal."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from stages.profile.section import Count, Dtype, Section, Share


class Limits(Section):
    """Bytes: the weights' allotment is the limit less the reserve for code, wheels and evidence."""

    limit_bytes: Count
    reserve_bytes: Count

    @property
    def allotment_bytes(self) -> int:
        """Bytes that the packed weights may take."""
        return self.limit_bytes - self.reserve_bytes

    @model_validator(mode="after")
    def _reserve_below_limit(self) -> Self:
        if self.reserve_bytes >= self.limit_bytes:
            raise ValueError(f"reserve_bytes must be below limit_bytes ({self.limit_bytes})")
        return self


class Serve(Section):
    """Limits of the server that is shipped."""

    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 16
    context_tokens: Count = 2048
    max_batch: Count = 32
    dtype_cpu: Dtype = "float32"


class Selfcheck(Section):
    """The rehearsal's numbers, as the contract states them."""

    in_flight: Count = 32
    request_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    budget_s: Annotated[float, Field(gt=0)] = 10800.0
    heldout_tokens: Count = 44314
    failure_share: Share = 0.05
    retries: Annotated[int, Field(ge=0)] = 2
