"""Completion servers for tests: our own engine behind vLLM's /v1/completions and SGLang's /generate.

What a server does wrong is ordered beforehand: one order for each question it is asked.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from upstreams import listening

from drafter.engine import Engine, Generated, Generation

Body = dict[str, Any]


@dataclass
class Completions:
    """One server, as a test sees it.

    Attributes:
        engine: what writes; one question at a time.
        model: the name under which it serves.
        address: where it listens.
        token_ids: whether it knows `return_token_ids`, as vLLM does from 0.10.2.
        key: the API key that it wants, if any.
        orders: what to do with the next questions: a status with or without `:Retry-After`, `cut`, `hold`
            (until released) or `malformed`.
        spoil: changes an answer, if set.
        held: the number of questions to wait for before the first is answered.
        asked: questions, with the moment of each; `prompts` are their ids, `keys` their credentials.
    """

    engine: Engine
    model: str = "toy/Random-Llama"
    address: str = ""
    token_ids: bool = True
    key: str = ""
    orders: list[str] = field(default_factory=list)
    spoil: Callable[[Body], None] | None = None
    held: int = 0
    asked: list[tuple[float, str, Body]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)
    gone: bool = False
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def answer(self, path: str, body: Body) -> Body:
        """Return the answer to a question, as the real server would word it."""
        answer = self._vllm(body) if path == "/v1/completions" else self._sglang(body)
        if self.spoil:
            self.spoil(answer)
        return answer

    def _generated(self, prompt: list[int], cap: int, stops: list[int], top_k: int) -> Generated:
        with self.lock:
            (row,) = self.engine.generate([prompt], Generation(cap, tuple(stops), top_k))
        return row

    def _vllm(self, body: Body) -> Body:
        assert (body["temperature"], body["n"], body["stream"], body["ignore_eos"]) == (0, 1, False, True)
        row = self._generated(body["prompt"], body["max_tokens"], body["stop_token_ids"], body["logprobs"])
        spell = "token_id:{}".format if body["return_tokens_as_token_ids"] else "<{}>".format
        pairs = [list(zip(ids, values, strict=True))
                 for ids, values in zip(row.topk_ids.tolist(), row.topk_logprobs.tolist(), strict=True)]
        logprobs = {
            "text_offset": [0] * len(pairs), "token_logprobs": [top[0][1] for top in pairs],
            "tokens": [spell(token) for token in row.tokens],
            "top_logprobs": [{spell(token): value for token, value in top} for top in pairs],
        }  # fmt: skip
        stopped = row.ended == "stop"
        choice = {"index": 0, "text": "", "logprobs": logprobs, "prompt_logprobs": None,
                  "finish_reason": "stop" if stopped else "length",
                  "stop_reason": row.tokens[-1] if stopped else None}
        if self.token_ids and body["return_token_ids"]:
            choice |= {"token_ids": row.tokens, "prompt_token_ids": body["prompt"]}
        return {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": body["model"],
                "choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]), "total_tokens": 0}}

    def _sglang(self, body: Body) -> Body:
        sampling = body["sampling_params"]
        assert sampling["temperature"] == 0
        assert not sampling.get("ignore_eos")
        assert body["return_logprob"]
        row = self._generated(body["input_ids"], sampling["max_new_tokens"], sampling["stop_token_ids"],
                              body["top_logprobs_num"])
        tops = [[[value, token, None] for token, value in zip(ids, values, strict=True)]
                for ids, values in zip(row.topk_ids.tolist(), row.topk_logprobs.tolist(), strict=True)]
        end = {"type": "stop", "matched": row.tokens[-1]} if row.ended == "stop" else {
            "type": "length", "length": len(row.tokens)}
        meta = {"id": "0", "finish_reason": end, "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(row.tokens), "output_token_logprobs": [top[0] for top in tops],
                "output_top_logprobs": tops}
        return {"text": "", "output_ids": row.tokens, "meta_info": meta}


@contextmanager
def completions(engine: Engine, **options: Any) -> Iterator[Completions]:
    """Serve an engine on a free port of this machine."""
    held = Completions(engine, **options)
    with listening(_Handler, held):
        try:
            yield held
        finally:
            held.gone = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held: Completions

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        answers = {"/v1/models": {"object": "list", "data": [{"id": self.held.model, "max_model_len": 1560}]},
                   "/version": {"version": "0.28.0"}, "/get_server_info": {"version": "0.5.9"}}
        if self._admitted():
            self._send(200 if self.path in answers else 404, json.dumps(answers.get(self.path, {})).encode())

    def do_POST(self) -> None:
        held = self.held
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._admitted():
            return
        with held.changed:
            held.asked.append((time.monotonic(), self.path, body))
            held.prompts.append(body.get("prompt") or body.get("input_ids"))
            order = held.orders.pop(0) if held.orders else ""
            held.at_once += 1
            held.most_at_once = max(held.most_at_once, held.at_once)
            held.changed.notify_all()
            held.changed.wait_for(lambda: len(held.asked) >= held.held, timeout=20)
        try:
            self._obey(order, body)
        finally:
            with held.changed:
                held.at_once -= 1

    def _obey(self, order: str, body: Body) -> None:
        if order[:1].isdigit():
            status, _, wait = order.partition(":")
            self._send(int(status), b'{"error": "as ordered"}', **({"Retry-After": wait} if wait else {}))
            return
        if order == "hold":
            self.held.released.wait(20)
        content = json.dumps(self.held.answer(self.path, body)).encode()
        if order == "malformed":
            content = content[: len(content) // 2]
        self._send(200, content, cut=order == "cut")

    def _admitted(self) -> bool:
        if self.held.gone:  # connections outlive the server that took them
            self.close_connection = True
            return False
        key = self.headers.get("Authorization")
        self.held.keys.add(key)
        if self.held.key and key != f"Bearer {self.held.key}":
            self._send(401, f'{{"error": "wrong key {key}"}}'.encode())
            return False
        return True

    def _send(self, status: int, body: bytes, cut: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
