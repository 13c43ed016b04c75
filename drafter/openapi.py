"""The server's description of itself: an OpenAPI 3.1 document with the limits of what is served."""

from typing import Any

from drafter.settings import Settings

Fields = dict[str, Any]


def document(settings: Settings, vocab_size: int, max_waiting: int, body_s: float) -> Fields:
    """Describe every route, every status it answers with and what the answers hold.

    Args:
        settings: the limits that were packed with the weights.
        vocab_size: ids run from 0 to vocab_size - 1.
        max_waiting: requests in flight before more are refused with 429.
        body_s: seconds that a body may take to arrive.
    """
    read = {
        "/health": _health("health", "200 while the next request can expect a draft.", "ready"),
        "/health/ready": _health("ready", "The same as /health.", "ready"),
        "/health/live": _health("live", "200 while the batcher's task runs.", "live"),
        "/metrics": _metrics(),
        "/version": _version(),
        "/openapi.json": _itself(),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "draftmill drafter",
            "version": "1",
            "description": "Drafts for greedy speculative decoding: a continuation of token ids to verify.",
        },
        "paths": {
            "/draft": {"post": _draft(settings, vocab_size, max_waiting, body_s)},
            **{path: {"get": get, "head": _without_content(get)} for path, get in read.items()},
        },
        "components": {"schemas": {"Error": _object({"error": {"type": "string", "minLength": 1}})}},
    }


def _draft(settings: Settings, vocab_size: int, max_waiting: int, body_s: float) -> Fields:
    tokens = {
        "description": f"The conversation's ids so far; drafted from the last {settings.context_tokens}.",
        "type": "array",
        "minItems": 1,
        "items": _ids(vocab_size),
    }
    draft = {"type": "array", "maxItems": settings.draft_tokens, "items": _ids(settings.token_limit)}
    busy = _refusal(f"{max_waiting} requests are in flight; try again.")
    busy["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return {
        "operationId": "draft",
        "summary": "Continue a conversation by a few ids.",
        "requestBody": {
            "required": True,
            "description": "Integers are written without fraction or exponent, and no key stands twice.",
            "content": _json({"type": "object", "required": ["tokens"], "properties": {"tokens": tokens}}),
        },
        "responses": {
            "200": _answer("The drafted ids; none after a fault inside.", _object({"draft": draft})),
            "400": _refusal("The body is not what it must be; the sentence says where."),
            "408": _refusal(f"The body did not arrive within {body_s:.0f} s."),
            "413": _refusal(f"The body is longer than {settings.request_max_bytes} bytes."),
            "429": busy,
        },
    }


def _health(name: str, description: str, good: str) -> Fields:
    states = {"ready": "not ready", "live": "dead"}
    return {
        "operationId": name,
        "description": description,
        "responses": {
            "200": _answer("Yes.", _object({"status": {"const": good}})),
            "503": _answer("No.", _object({"status": {"const": states[good]}})),
        },
    }


def _metrics() -> Fields:
    text = {
        "description": "Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    return {"operationId": "metrics", "responses": {"200": text}}


def _version() -> Fields:
    digest = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    fields = {
        "model": {"type": "string"},
        "weights_sha256": digest,
        "serving_sha256": digest,
        "sums_sha256": {"anyOf": [digest, {"type": "null"}]},
    }
    return {
        "operationId": "version",
        "responses": {"200": _answer("The name and the digests of what is served.", _object(fields))},
    }


def _itself() -> Fields:
    return {
        "operationId": "openapi",
        "responses": {"200": _answer("This document.", {"type": "object", "required": ["openapi", "paths"]})},
    }


def _without_content(get: Fields) -> Fields:
    responses = {status: {"description": one["description"]} for status, one in get["responses"].items()}
    return get | {"operationId": f"{get['operationId']}_head", "responses": responses}


def _ids(count: int) -> Fields:
    return {"type": "integer", "minimum": 0, "maximum": count - 1}


def _object(properties: Fields) -> Fields:
    return {
        "type": "object",
        "required": list(properties),
        "properties": properties,
        "additionalProperties": False,
    }


def _json(schema: Fields) -> Fields:
    return {"application/json": {"schema": schema}}


def _answer(description: str, schema: Fields) -> Fields:
    return {"description": description, "content": _json(schema)}


def _refusal(description: str) -> Fields:
    return _answer(description, {"$ref": "#/components/schemas/Error"})
