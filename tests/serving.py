"""Real server processes over a tiny drafter with random weights, for the tests."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import torch

from drafter import weights
from drafter.config import ModelConfig
from drafter.model import Decoder
from drafter.server import START_S

ROOT = Path(__file__).parents[1]
TOKEN_LIMIT = 500
CONTEXT = 96
CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    qk_norm=False,
)
SERVING = {
    "draft_tokens": 16,
    "context_tokens": CONTEXT,
    "max_batch": 32,
    "token_limit": TOKEN_LIMIT,
    "dtype_cpu": "float32",
    "request_max_bytes": 100_000,
}
# For what is tried by the thousand.
SHALLOW = replace(CONFIG, layers=1)
FEW = 4
QUICK = SERVING | {"draft_tokens": FEW}


def random_tensors(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    """Random weights, wide enough that drafts differ from one another."""
    torch.manual_seed(0)
    with torch.no_grad():
        return {
            name: value if "norm" in name else torch.randn_like(value) * 0.3
            for name, value in Decoder(config).state_dict().items()
        }


def write_model(folder: Path, serving: dict[str, object] = SERVING, config: ModelConfig = CONFIG,
                tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write what the server reads: weights, random ones if none are given, serving.json and their sums."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config) if tensors is None else tensors
    plan = {name: {"codec": "bf16", "shape": list(value.shape)} for name, value in tensors.items()}
    weights.save(folder / "model.safetensors", config, plan, weights.encode(tensors, plan))
    (folder / "serving.json").write_text(json.dumps(serving))
    write_sums(folder, ["model.safetensors", "serving.json"])
    return folder


def write_sums(folder: Path, names: list[str]) -> None:
    """Write SHA256SUMS over some files of a folder."""
    rows = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(rows))


def environment(**changes: str) -> dict[str, str]:
    """The environment of a test's server: one thread, no spinning, any free port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOST"))}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PORT": "0", **changes}


class Server:
    """A running server: its process, its address, and the log it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""

    def events(self) -> list[dict[str, object]]:
        """What it logged, the lines that are JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def wait_until_ready(self, deadline_s: float = START_S, starts: int = 1) -> None:
        """Wait for the port that it logs and for /health, polling with a deadline."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {self.process.returncode}: {self.log.read_text()}"
                )
            ports = [event["port"] for event in self.events() if event["event"] == "listening"]
            if len(ports) >= starts:
                self.url = f"http://127.0.0.1:{ports[-1]}"
                if answers(self.url):
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {deadline_s} s: {self.log.read_text()}")

    def wait_for(self, text: str, deadline_s: float = 60) -> None:
        """Wait until the log holds a text."""
        self.wait_until(lambda: text in self.log.read_text(), deadline_s)

    def wait_until(self, happened: Callable[[], bool], deadline_s: float = 60) -> None:
        """Wait until something is so."""
        end = time.monotonic() + deadline_s
        while not happened():
            assert time.monotonic() < end, f"nothing in {deadline_s} s: {self.log.read_text()}"
            time.sleep(0.02)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code; the server has 10 s."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def answers(url: str) -> bool:
    """Whether /health says 200."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def figures(url: str) -> dict[str, float]:
    """What /metrics says, by name and labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@contextmanager
def started(command: list[str], log: Path, cwd: Path | None = None, **env: str):
    """Run a server command until the block ends."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
            cwd=cwd or ROOT,
            env=environment(**env),
        )
    server = Server(process, log)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running(folder: Path, *arguments: str, module: tuple[str, ...] = ("-m", "drafter.server"), **env: str):
    """Run `python -m drafter.server` over a folder until the block ends."""
    command = [sys.executable, *module, "--weights", str(folder), *arguments]
    with started(command, folder.parent / f"{folder.name}.log", **env) as server:
        server.wait_until_ready()
        yield server


def failed(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself."""
    command = [sys.executable, "-m", "drafter.server", "--weights", str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment(**env), check=False
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


class Wire:
    """One kept-alive connection that sends any bytes, in a rhythm of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str, buffer_bytes: int = 0) -> "Wire":
        """Connect; with a receive buffer of so many bytes what is not read stays with the server."""
        host, _, port = url.removeprefix("http://").partition(":")
        own = socket.socket()
        own.setblocking(False)
        if buffer_bytes:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=own, limit=buffer_bytes or 1 << 16))

    async def send(self, *parts: bytes, pause_s: float = 0.0) -> None:
        """Write the parts of a request, with a pause between them."""
        for number, part in enumerate(parts):
            await asyncio.sleep(pause_s if number else 0)
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self) -> tuple[int, bytes] | None:
        """Status and body of the next answer; None if the server closed the connection instead."""
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            return int(head.split(maxsplit=2)[1]), await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def until_closed(self) -> None:
        """Wait until the server ends the connection; what it still sends is dropped."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def leave(self) -> None:
        """Close at once, whatever is under way: the server is sent a reset."""
        self.writer.transport.abort()


def post(body: bytes, *headers: str) -> bytes:
    """A drafting request as it is sent; other headers stand before those of the body."""
    lines = ["POST /draft HTTP/1.1", "Host: drafter", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
