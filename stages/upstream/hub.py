"""The model hub, by huggingface_hub over plain HTTPS: bounded waits, whole files, no secrets in what is said.

One loop of attempts is ours; the client's own (which ignores Retry-After) never sees a fault of an answer.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import requests
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from stages.errors import UserError
from stages.upstream.pinned import FILE, Source
from stages.upstream.retries import is_transient, retry_after_s

METHOD = "https"  # what the log calls the transfer: ranges over HTTP, never Xet or hf_transfer
IDLE_S = 30.0  # a transfer that brings nothing for so long is broken off and resumed
CHUNK_BYTES = 1 << 20  # what is lost at most when a transfer breaks off
ATTEMPTS = 6
FIRST_WAIT_S = 2.0  # doubled each time, unless the hub says Retry-After
LONGEST_WAIT_S = 300.0


class _BusyError(Exception):
    """The hub answered, but not now."""

    def __init__(self, status: int, wait_s: float | None) -> None:
        super().__init__(f"the hub answers {status}")
        self.status, self.wait_s = status, wait_s


class _LostError(Exception):
    """No answer came."""


@dataclass(frozen=True)
class Fault:
    """What went wrong in one attempt; whether another may go better, after `wait_s` if the hub said so."""

    reason: str
    again: bool
    http_status: int | None = None
    wait_s: float | None = None


@dataclass
class _Transfers:
    """The transfers of one call of the client, which resumes one that breaks off without a word to us.

    Attributes:
        failed: told of each that broke off, as it is resumed.
        under_way: whether one has begun.
    """

    failed: Callable[[Fault], None]
    under_way: bool = False

    def asked(self, request: requests.PreparedRequest) -> None:
        """See a request go out: after a transfer has begun the next one is its resumption."""
        if self.under_way and request.method == "GET":
            first = str(request.headers.get("Range", "bytes=0-")).removeprefix("bytes=").partition("-")[0]
            self.failed(Fault(f"the transfer broke off, and goes on from byte {first}", again=True))
            self.under_way = False

    def answered(self, request: requests.PreparedRequest, status: int) -> None:
        """See an answer come."""
        self.under_way = request.method == "GET" and status in (200, 206)


class _Session(requests.Session):
    """Turns a busy hub and a lost connection into faults that reach our loop at once."""

    def __init__(self, transfers: _Transfers | None = None) -> None:
        super().__init__()
        self._transfers = transfers

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        if self._transfers:
            self._transfers.asked(request)
        try:
            response = super().send(request, **options)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise _LostError(type(error).__name__) from error
        if is_transient(response.status_code):
            response.close()
            raise _BusyError(response.status_code, retry_after_s(response.headers.get("Retry-After")))
        if self._transfers:
            self._transfers.answered(request, response.status_code)
        return response


@contextmanager
def plain_https() -> Iterator[None]:
    """Pin how the hub is spoken to while the block lasts, whatever the environment's switches say."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so the hub cannot be asked: unset it for this command")
    pinned = {
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_ENABLE_HF_TRANSFER": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DOWNLOAD_TIMEOUT": IDLE_S,
        "HF_HUB_ETAG_TIMEOUT": IDLE_S,
        "DOWNLOAD_CHUNK_SIZE": CHUNK_BYTES,
    }
    before = {name: getattr(constants, name) for name in pinned}
    loudness = hub_logging.get_verbosity()
    for name, value in pinned.items():
        setattr(constants, name, value)
    huggingface_hub.configure_http_backend(_Session)
    hub_logging.set_verbosity(logging.ERROR)  # its warnings carry whole addresses
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)
        huggingface_hub.configure_http_backend()
        hub_logging.set_verbosity(loudness)
        enable_progress_bars()


def access() -> dict[str, Any]:
    """Return whom to ask, and as whom: HF_ENDPOINT and HF_TOKEN, and never a token from a file.

    Raises:
        UserError: the token cannot be sent.
    """
    token = os.environ.get("HF_TOKEN", "").strip()  # out of a file it comes with a line's end
    if not (token.isascii() and token.isprintable()):
        raise UserError("HF_TOKEN holds a character that no token has: set it anew")
    return {"endpoint": os.environ.get("HF_ENDPOINT", "").strip() or None, "token": token or False}


def download(
    source: Source, name: str, folder: Path, failed: Callable[[Fault], None], afresh: bool = False
) -> Path:
    """Download one file of a hub source into a folder as a real file; resume a partial one unless `afresh`.

    `failed` is told of each transfer that broke off and that the client has resumed by itself. Raises
    whatever the client raises: `patiently` makes a fault of it.
    """
    # After a transfer that breaks off the client takes a new session.
    transfers = _Transfers(failed)
    huggingface_hub.configure_http_backend(lambda: _Session(transfers))
    return Path(
        huggingface_hub.hf_hub_download(
            source.name,
            name,
            repo_type=source.repo_type,
            revision=source.revision,
            local_dir=folder,
            force_download=afresh,
            etag_timeout=IDLE_S,
            **access(),
        )
    )


def patiently[Result](what: str, action: Callable[[], Result], failed: Callable[[Fault], None]) -> Result:
    """Call until it succeeds, waiting between attempts as told or twice as long each time.

    Args:
        what: what is being fetched, for the sentence.
        action: one attempt.
        failed: told of every fault, before any wait.

    Raises:
        UserError: a fault that no further attempt would mend, or the last attempt failed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            failed(fault)
            if not fault.again:
                raise UserError(f"{what}: {fault.reason}") from None
            if attempt < ATTEMPTS:
                told = fault.wait_s if fault.wait_s is not None else FIRST_WAIT_S * 2 ** (attempt - 1)
                time.sleep(min(told, LONGEST_WAIT_S))
            last = fault.reason
    raise UserError(
        f"{what}: {last}, {ATTEMPTS} times in a row; run the same command again later, it goes on from "
        "what it has"
    ) from None


def fault_of(error: BaseException) -> Fault | None:
    """Return what an exception of the client means; None if it is no fault of hub, network or disk."""
    fault: Fault | None = None
    match error:
        case _BusyError():
            fault = Fault(str(error), again=True, http_status=error.status, wait_s=error.wait_s)
        case _LostError():
            fault = Fault("the hub does not answer (is there a network? is HF_ENDPOINT right?)", again=True)
        case LocalEntryNotFoundError() if error.__cause__ is not None:
            fault = fault_of(error.__cause__)  # what the hub answered when it was asked for the file's size
        case HfHubHTTPError():
            fault = _refused(error, error.response.status_code if error.response is not None else None)
        case requests.RequestException():
            fault = Fault(f"the transfer broke off ({type(error).__name__})", again=True)
        case FileMetadataError():
            fault = Fault("the answer is not a model hub's (is HF_ENDPOINT right?)", again=False)
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            fault = Fault(f"cannot write here: {os.strerror(error.errno)}", again=False)
        case OSError() if "onsistency check" in str(error):
            fault = Fault("the transfer ended early", again=True)
        case OSError() | ValueError() if error.__cause__ is not None:
            fault = fault_of(error.__cause__)
    return fault


def _refused(error: HfHubHTTPError, status: int | None) -> Fault:
    if status in (401, 403):
        reason = (
            f"the hub refuses access ({status}): set HF_TOKEN to a token that may read it, and accept its "
            "terms on the hub if it has any"
        )
    elif isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | EntryNotFoundError):
        reason = f"the hub has no such repository, commit or file; correct {FILE}"
    else:
        reason = f"the hub answers {status}"
    return Fault(reason, again=False, http_status=status)
