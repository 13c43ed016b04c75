"""The HTTP side: routes, what is refused and in which words, what is counted."""

import asyncio
import json
import logging
import time
from typing import Any

from sanic import Sanic
from sanic.exceptions import PayloadTooLarge, SanicException
from sanic.request import Request
from sanic.response import BaseHTTPResponse, HTTPResponse, raw

from drafter import logs, openapi
from drafter.batcher import Batcher, BusyError
from drafter.metrics import Metrics
from drafter.request import BadRequestError, parse_tokens
from drafter.settings import Address, Settings, Sums

ANSWER_S = 50.0  # whatever happens, a valid request has its answer by then; clients give up at 60
BODY_S = 30.0
KEEP_ALIVE_S = 180  # longer than any client's pause: a connection closed under a request looks like a loss
DRAINED_BYTES = 64 << 20  # a body this long is read to its end before 413, so that its sender sees the answer
RETRY_S = 1
READ = ("GET", "HEAD")

REFUSALS: dict[type[Exception], str] = {
    BadRequestError: "refused", BusyError: "busy", TimeoutError: "late_body",
    PayloadTooLarge: "too_large", SanicException: "refused",
}


class AnyRequest(Request):
    """A request of any address: one that cannot be read is one that no route knows, and is answered so.

    Sanic would raise once more in making the request to be refused, and close the connection without a word.
    """

    def __init__(self, url_bytes: bytes, *arguments: Any, **named: Any) -> None:
        try:
            super().__init__(url_bytes, *arguments, **named)
        except SanicException:
            super().__init__(b"/unreadable", *arguments, **named)


class Service:
    """The state behind the routes of one server."""

    def __init__(self, settings: Settings, address: Address, sums: Sums, vocab_size: int,
                 batcher: Batcher) -> None:
        self.settings = settings
        self.address = address
        self.sums = sums
        self.vocab_size = vocab_size
        self.batcher = batcher
        self.draining = False

    @property
    def metrics(self) -> Metrics:
        """What is counted, shared with the batcher."""
        return self.batcher.metrics

    def app(self) -> Sanic[Any, Any]:
        """Make the Sanic application."""
        app: Sanic[Any, Any] = Sanic("drafter", configure_logging=False, dumps=json.dumps,
                                     request_class=AnyRequest)  # fmt: skip
        app.config.update({
            "KEEP_ALIVE_TIMEOUT": KEEP_ALIVE_S,
            "REQUEST_MAX_SIZE": DRAINED_BYTES,
            "REQUEST_TIMEOUT": 60,
            "RESPONSE_TIMEOUT": 75,  # above ANSWER_S + BODY_S / 2: Sanic's own 503 must never be the answer
            "ACCESS_LOG": False,
        })

        async def draft(request: Request) -> HTTPResponse:  # Sanic marks handlers, and methods bear no marks
            return await self.draft(request)

        app.add_route(draft, "/draft", methods=["POST"], stream=True)
        app.add_route(self.ready, "/health", methods=READ, name="health")
        app.add_route(self.ready, "/health/ready", methods=READ)
        app.add_route(self.live, "/health/live", methods=READ)
        app.add_route(self.metrics_text, "/metrics", methods=READ)
        app.add_route(self.version, "/version", methods=READ)
        app.add_route(self.openapi, "/openapi.json", methods=READ)
        app.error_handler.add(Exception, self.refuse)
        app.register_middleware(self.last_answer, "response")
        return app

    async def draft(self, request: Request) -> HTTPResponse:
        """POST /draft: ids in, drafted ids out."""
        started = time.monotonic()
        outcome, tokens, draft = "disconnected", [], []
        try:
            tokens = parse_tokens(await self._body(request), self.vocab_size)
            draft = await self._drafted(tokens, ANSWER_S - (time.monotonic() - started))
            outcome = "drafted" if draft else "empty"
            return _answer({"draft": draft})
        except tuple(REFUSALS) as error:
            outcome = next(name for kind, name in REFUSALS.items() if isinstance(error, kind))
            raise
        finally:
            self.metrics.requests.labels(outcome).inc()
            if outcome == "empty":
                self.metrics.empty_drafts.inc()
            logs.event(logging.DEBUG, "request", outcome=outcome, tokens=len(tokens), drafted=len(draft),
                       took_s=round(time.monotonic() - started, 4))

    async def _drafted(self, tokens: list[int], timeout_s: float) -> list[int]:
        try:
            return await self.batcher.submit(tokens, timeout_s)
        except BusyError:
            raise
        except Exception as error:  # a valid request never fails, not even by a fault of ours
            self.metrics.failures.labels("server").inc()
            logs.event(logging.ERROR, "request failed", error=logs.described(error))
            return []

    async def _body(self, request: Request) -> bytes:
        """Read a body; of one that is too long, read on to its end and keep nothing."""
        chunks: list[bytes] = []
        size, limit = 0, self.settings.request_max_bytes
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream:  # type: ignore[union-attr]
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                elif size > DRAINED_BYTES:
                    break
                else:
                    chunks.clear()
        if size > limit:
            raise PayloadTooLarge("body")
        return b"".join(chunks)

    async def ready(self, _request: Request) -> HTTPResponse:
        """GET /health, /health/ready: 200 while the next request can expect a draft."""
        good = not self.draining and self.batcher.ready(ANSWER_S)
        return _answer({"status": "ready" if good else "not ready"}, 200 if good else 503)

    async def live(self, _request: Request) -> HTTPResponse:
        """GET /health/live: 200 while the batcher's task runs."""
        good = self.batcher.alive
        return _answer({"status": "live" if good else "dead"}, 200 if good else 503)

    async def metrics_text(self, _request: Request) -> HTTPResponse:
        """GET /metrics: Prometheus' text format."""
        return raw(self.metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, _request: Request) -> HTTPResponse:
        """GET /version: what is served."""
        return _answer({
            "model": self.address.model_name,
            "weights_sha256": self.sums.weights,
            "serving_sha256": self.sums.serving,
            "sums_sha256": self.sums.sums,
        })

    async def openapi(self, _request: Request) -> HTTPResponse:
        """GET /openapi.json: what all of this takes and gives."""
        limits = self.batcher.limits
        return _answer(openapi.document(self.settings, self.vocab_size, limits.max_waiting, BODY_S))

    async def last_answer(self, request: Request, _response: BaseHTTPResponse) -> None:
        """While the server goes down, make each answer the last one of its connection.

        After a fault that sticks, the client's next request so goes to the next server.
        """
        if self.draining or self.batcher.given_up.is_set():
            _close_after(request)

    async def refuse(self, request: Request, error: Exception) -> HTTPResponse:
        """Turn whatever was raised into a status and a sentence."""
        if isinstance(error, BadRequestError):
            return _refusal(400, str(error))
        if isinstance(error, BusyError):
            limit = self.batcher.limits.max_waiting
            return _refusal(429, f"{limit} requests are in flight; try again", {"Retry-After": str(RETRY_S)})
        if isinstance(error, TimeoutError):
            _close_after(request)
            return _refusal(408, f"the body did not arrive within {BODY_S:.0f} s")
        if isinstance(error, PayloadTooLarge):
            part, limit = "body", self.settings.request_max_bytes
            if "header" in str(error):
                part, limit = "header", request.app.config.REQUEST_MAX_HEADER_SIZE
            return _refusal(413, f"the {part} is longer than the limit of {limit} bytes")
        if isinstance(error, SanicException):
            return _refusal(error.status_code, _sentence(request, error), error.headers)
        logs.event(logging.ERROR, "handler failed", path=request.path, error=logs.described(error))
        self.metrics.failures.labels("server").inc()
        return _refusal(500, "a fault inside the server; its log says more")


def _close_after(request: Request) -> None:
    stream: Any = request.stream
    if stream is not None:
        stream.keep_alive = False


def _sentence(request: Request, error: SanicException) -> str:
    if error.status_code == 404:
        return "there is no such path; drafts are at POST /draft"
    if error.status_code == 405:
        return f"{request.method} is not allowed on {request.path}"
    return str(error) or "the request could not be read"


def _answer(value: dict[str, object], status: int = 200,
            headers: dict[str, str] | None = None) -> HTTPResponse:
    return raw(json.dumps(value), status=status, headers=headers, content_type="application/json")


def _refusal(status: int, sentence: str, headers: dict[str, str] | None = None) -> HTTPResponse:
    return _answer({"error": sentence}, status, headers)
