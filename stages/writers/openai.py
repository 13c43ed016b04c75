"""The target on completion servers elsewhere: prompts go out as token ids, rows of a shard come back.

Any number of servers side by side. One that is busy or lost rests and is tried again, while the others do its
part; one that says itself that it is asked too much (429) is never given up for it. An answer that breaks the
contract stops the run, for what a wrong server wrote is worse than nothing.
"""

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from drafter.engine import Generated, Generation
from stages.errors import UserError
from stages.job import Job
from stages.profile import Servers
from stages.upstream.retries import TOO_MANY, is_transient, retry_after_s
from stages.wrapper.redaction import hide_secrets
from stages.writers.contract import checked
from stages.writers.protocols import DIALECTS, AnswerError, served, version

KEY_VARIABLE = "TEACHER_API_KEY"
ATTEMPTS = 6  # of one prompt, and of one server in a row, before it is given up
FIRST_WAIT_S = 2.0  # doubled each time, unless the server says Retry-After
LONGEST_WAIT_S = 300.0
PATIENCE_S = 3600.0  # so long may all that answers be "too many requests"
CONNECT_S = 10.0
AGAIN = "run the same command again later: finished shards are kept"


@dataclass(eq=False)
class Fault(Exception):  # noqa: N818 (it is a fact that is passed on, not an error of this program)
    """What went wrong in one request that may go better in another.

    Attributes:
        reason: in words, after the server's address.
        wait_s: how long the server wants to be left alone, if it says so.
        of_prompt: whether the prompt may be at fault, and not only the server.
        of_server: whether the server may be at fault, and not only how much it is asked.
    """

    reason: str
    wait_s: float | None = None
    of_prompt: bool = True
    of_server: bool = True


@dataclass
class Server:
    """One address and how it fares.

    Attributes:
        facts: what it tells of itself, once it was asked.
        busy: requests under way.
        failures, refusals: in a row, refusals being answers 429; those under way at the same time count once.
        failed_at, rests_until: on the loop's clock, in seconds.
        reason: of the last failure.
    """

    address: str
    facts: dict[str, Any] = field(default_factory=dict)
    busy: int = 0
    failures: int = 0
    refusals: int = 0
    failed_at: float = 0.0
    rests_until: float = 0.0
    reason: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """Writes with servers.

    Args:
        settings: which servers, and how they are asked.
        model: the name under which they must serve the target.
        token_count: ids from here on are no tokens.
        job: told of servers that fail.

    Raises:
        UserError: the API key cannot be sent.
    """

    def __init__(self, settings: Servers, model: str, token_count: int, job: Job) -> None:
        self.settings, self.model, self.token_count, self.job = settings, model, token_count, job
        self.dialect = DIALECTS[settings.protocol]
        self.servers = [Server(address) for address in settings.addresses]
        self.wrote: set[str] = set()
        self.changed = asyncio.Event()
        self.wrote_at = 0.0  # when a prompt was last answered, on the loop's clock
        self.runner = asyncio.Runner()  # one loop, so that connections outlive a shard
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{KEY_VARIABLE} holds a character that no API key has: set it anew")
        count = settings.in_flight * len(self.servers)
        # No proxies, no .netrc: nobody is asked but the servers that are declared.
        self.client = httpx.AsyncClient(
            trust_env=False, verify=ssl.create_default_context(),
            timeout=httpx.Timeout(settings.timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=count, max_keepalive_connections=count),
            headers={"Authorization": f"Bearer {key}"} if key else {})

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Return the greedy continuation of each prompt.

        Raises:
            UserError: a server breaks the contract or refuses, or none is left.
        """
        self.wrote.clear()
        return self.runner.run(self._all(prompts, settings))

    def origin(self) -> list[dict[str, Any]]:
        """Return the servers that wrote what was generated last: address, protocol, model, version."""
        return [server.facts for server in self.servers if server.address in self.wrote]

    async def _all(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        self.wrote_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(prompt, settings)) for prompt in prompts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, prompt: list[int], settings: Generation) -> Generated:
        """Ask for one prompt until it is answered, of whichever server is free."""
        faults = 0
        while True:
            server = await self._free_server()
            began = asyncio.get_running_loop().time()
            try:
                await self._meet(server, began)
                return await self._asked(server, prompt, settings)
            except Fault as fault:
                self._failed(server, fault, began)
                faults += fault.of_prompt
                if faults == ATTEMPTS:
                    raise UserError(f"{server.address} {fault.reason}; a prompt of {len(prompt)} tokens was "
                                    f"asked for {ATTEMPTS} times. If that passes, {AGAIN}") from None
            except AnswerError as error:
                raise UserError(f"{server.address} {error}") from None
            finally:
                server.busy -= 1
                self.changed.set()

    async def _asked(self, server: Server, prompt: list[int], settings: Generation) -> Generated:
        question = self.dialect.question(self.model, prompt, settings)
        body = await self._body("POST", server, self.dialect.path, question)
        answer = self.dialect.read(body, self.model, prompt)
        row = checked(answer, prompt, settings, self.token_count)
        if server.failures < ATTEMPTS:
            server.failures = server.refusals = 0
        self.wrote.add(server.address)
        self.wrote_at = asyncio.get_running_loop().time()
        return row

    async def _meet(self, server: Server, began: float) -> None:
        """Ask a server who it is, unless it has told.

        Raises:
            AnswerError: it does not serve the target.
            Fault: it does not answer.
        """
        async with server.lock:
            if server.facts:
                return
            if server.failed_at > began:  # another prompt has just found out
                raise Fault(server.reason, of_prompt=False)
            server.facts = await self._introduction(server)
            self.job.event("server", **server.facts)

    async def _introduction(self, server: Server) -> dict[str, Any]:
        names = served(await self._body("GET", server, "/v1/models"))
        if self.model not in names:
            raise AnswerError(f"serves {', '.join(names) or 'nothing'}, and not {self.model}; start it with "
                              f"--served-model-name {self.model} if it is the same")
        try:
            told = version(await self._body("GET", server, self.dialect.version_path))
        except AnswerError:
            told = "untold"
        facts = {"address": server.address, "protocol": self.settings.protocol, "model": self.model,
                 "version": told}
        return {name: hide_secrets(fact) for name, fact in facts.items()}

    async def _body(self, method: str, server: Server, path: str, question: Any = None) -> bytes:
        """Return the body of an answer 200.

        Raises:
            Fault: it was busy, late or lost.
            AnswerError: it refused.
        """
        with _faults(self.settings.timeout_s):
            async with asyncio.timeout(self.settings.timeout_s):
                answer = await self.client.request(method, f"{server.address}{path}", json=question)
        if is_transient(answer.status_code):
            refused = answer.status_code == TOO_MANY
            raise Fault(f"answers {answer.status_code}", retry_after_s(answer.headers.get("Retry-After")),
                        of_prompt=not refused and answer.status_code != httpx.codes.SERVICE_UNAVAILABLE,
                        of_server=not refused)
        if answer.status_code in (401, 403):
            raise AnswerError(f"refuses access ({answer.status_code}): set {KEY_VARIABLE} to its API key")
        if answer.status_code != httpx.codes.OK:
            said = " ".join(hide_secrets(answer.text).split())[:300]  # a key cut in two would not be known
            raise AnswerError(f"refuses {path} ({answer.status_code}): {said}")
        return answer.content

    async def _free_server(self) -> Server:
        """Wait for a server that neither rests nor has its fill, and take a place at the least busy one.

        Raises:
            UserError: all have been given up.
        """
        while True:
            left = [server for server in self.servers if server.failures < ATTEMPTS]
            if not left:
                stories = "; ".join(f"{server.address} {server.reason}" for server in self.servers)
                raise UserError(f"no server is left after {ATTEMPTS} failures in a row: {stories}. Mend "
                                f"them, and {AGAIN}")
            now = asyncio.get_running_loop().time()
            free = [server for server in left
                    if server.rests_until <= now and server.busy < self.settings.in_flight]
            if free:
                chosen = min(free, key=lambda server: server.busy)
                chosen.busy += 1
                return chosen
            rests = [server.rests_until - now for server in left if server.rests_until > now]
            self.changed.clear()
            try:
                async with asyncio.timeout(min(rests, default=None)):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _failed(self, server: Server, fault: Fault, began: float) -> None:
        """Let a server rest; requests that were under way when it failed fail with it, and count once."""
        now = asyncio.get_running_loop().time()
        if began < server.failed_at and fault.wait_s is None:
            return
        if began >= server.failed_at:
            server.failures += fault.of_server
            server.refusals += not fault.of_server
            server.failed_at, server.reason = now, fault.reason
            self.job.event("server failed", address=server.address, reason=fault.reason,
                           failures=server.failures, refusals=server.refusals)
            if fault.of_server and server.failures == ATTEMPTS:
                self.job.say(f"{server.address} {fault.reason}, {ATTEMPTS} times in a row: it is left out")
        if not fault.of_server and now - self.wrote_at > PATIENCE_S:
            raise UserError(f"{server.address} {fault.reason}, and no server has answered a prompt for "
                            f"{PATIENCE_S:,.0f} s. Let more requests through, and {AGAIN}")
        doublings = min(server.failures + server.refusals - 1, 10)
        wait_s = fault.wait_s or FIRST_WAIT_S * 2**doublings  # "at once" is no help, said time and again
        server.rests_until = max(server.rests_until, now + min(wait_s, LONGEST_WAIT_S))


@contextmanager
def _faults(timeout_s: float) -> Iterator[None]:
    """Make faults of what httpx raises where an answer is late or a connection lost."""
    try:
        yield
    except (TimeoutError, httpx.ReadTimeout):
        raise Fault(f"has not answered within {timeout_s:g} s") from None
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Fault(f"cannot be reached ({str(error) or type(error).__name__})", of_prompt=False) from None
    except httpx.RequestError as error:
        raise Fault(f"broke off the connection ({type(error).__name__})") from None


def open_writer(job: Job) -> Fleet:
    """Return the writer that asks the profile's servers; it meets them with the first prompts.

    Raises:
        UserError: the API key cannot be sent.
    """
    target = job.config.target
    return Fleet(job.config.servers, target.name, target.token_count, job)
