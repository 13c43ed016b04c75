"""Stand-ins over real TCP for a model hub and a package index, that misbehave on demand; hand-made wheels."""

import hashlib
import io
import json
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from stages.job import Job

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def job(root: Path, stage: str, out: str, **sections: object) -> Job:
    """A job as the runner would give it."""
    for name in (out, "work", "logs/p"):
        (root / name).mkdir(parents=True, exist_ok=True)
    return Job(
        stage=stage,
        config=SimpleNamespace(**sections),
        inputs={"fetch": root / "vendor"},
        out=root / out,
        work=root / "work",
        root=root,
        seed=0,
        device="cpu",
        log=root / "logs/p" / f"{stage}.log",
    )


def wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    tag: str = "py3-none-any",
    requires: tuple[str, ...] = (),
    files: dict[str, str] | None = None,
    extra: str = "",
) -> Path:
    """Write a small wheel with one module of its own name, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-{tag}.whl"
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense-Expression: MIT\n{extra}"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    tags = "".join(
        f"Tag: {tag.split('-')[0]}-{tag.split('-')[1]}-{one}\n" for one in tag.split("-")[2].split(".")
    )
    content = (
        {f"{module}.py": "value = 1\n"}
        | (files or {})
        | {
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\n{tags}",
        }
    )
    record = "".join(f"{member},,\n" for member in [*content, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, text in (content | {f"{info}/RECORD": record}).items():
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), text)
    path.write_bytes(buffer.getvalue())
    return path


class Upstream:
    """What the stand-in holds, how it is to misbehave, and what it was asked.

    Attributes:
        files: path in the repository -> bytes; over 1,000 of them it is large (LFS, by redirect).
        repositories: models/OWNER/NAME or datasets/OWNER/NAME -> files, where there are several.
        index: folder of wheels and source archives, served as a simple index.
        orders: path -> what to do with the next transfers of it, one each; '' is to serve it rightly.
        asked: (method, path, Range, Authorization) of every request.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.index: Path | None = None
        self.orders: dict[str, list[str]] = defaultdict(list)
        self.commit = COMMIT
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        self.released = threading.Event()
        self.address = ""

    def files_at(self, path: str) -> dict[str, bytes] | None:
        """The files of the repository that a path is about, if there is one, and at that commit."""
        parts = path.removeprefix("/api/").strip("/").split("/")
        if parts[0] not in ("models", "datasets"):
            parts.insert(0, "models")
        revision = parts[4] if len(parts) > 4 else self.commit
        if revision not in (COMMIT, self.commit):
            return None
        return self.repositories.get("/".join(parts[:3])) if self.repositories else self.files

    def transfers(self, name: str) -> list[str | None]:
        """The Range of each transfer of a file, in order."""
        return [
            span
            for method, path, span, _ in self.asked
            if method == "GET" and path.endswith(f"/{name}") and "/api/" not in path
        ]


@contextmanager
def upstream() -> Iterator[Upstream]:
    """Serve an Upstream on a free port."""
    held = Upstream()
    with listening(_Handler, held):
        yield held


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], held: Any) -> Iterator[None]:
    """Let a handler answer for what a test holds, which is told its address; in the end it is released."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"held": held}))
    server.daemon_threads = True
    held.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        held.released.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held: Upstream

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        held, path = self.held, unquote(urlsplit(self.path).path)
        held.asked.append((self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
        if path.startswith("/simple/") or path.startswith("/files/"):
            self._index(path)
        elif path.startswith("/api/"):
            self._listing(path)
        elif path.startswith("/cdn/") or "/resolve/" in path:
            self._file(path)
        else:
            self._send(404)

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refused(self, order: str) -> None:
        status, _, wait = order.partition(":")
        echoed = f"denied for {self.headers.get('Authorization')}".encode()
        self._send(int(status), echoed, **({"Retry_After": wait} if wait else {}))

    def _listing(self, path: str) -> None:
        held = self.held
        if held.orders["api"]:
            self._refused(held.orders["api"].pop(0))
            return
        files = held.files_at(path)
        if files is None:
            self._send(404, X_Error_Code="RevisionNotFound")
            return
        siblings = []
        for name, content in files.items():
            large = {"lfs": {"sha256": sha256(content), "size": len(content), "pointerSize": 130}}
            siblings.append(
                {"rfilename": name, "size": len(content)} | (large if len(content) > 1000 else {})
            )
        self._send(200, json.dumps({"id": "o/n", "sha": held.commit, "siblings": siblings}).encode())

    def _file(self, path: str) -> None:
        held = self.held
        redirected = path.startswith("/cdn/")
        path = path.removeprefix("/cdn")
        files = held.files_at(path)
        name = path.split("/resolve/", 1)[1].split("/", 1)[1]
        content = None if files is None else files.get(name)
        order = held.orders[name][0] if held.orders[name] else ""
        if content is None:
            self._send(404, b"", X_Error_Code="RevisionNotFound" if files is None else "EntryNotFound")
        elif order[:1].isdigit():
            held.orders[name].pop(0)
            self._refused(order)
        elif len(content) > 1000 and not redirected:
            self._send(
                302,
                Location=f"{held.address}/cdn{quote(path)}",
                X_Linked_Etag=f'"{sha256(content)}"',
                X_Linked_Size=str(len(content)),
                X_Repo_Commit=held.commit,
                ETag='"pointer"',
            )
        elif self.command == "HEAD":
            self._send(
                200, ETag=f'"{sha256(content)}"', X_Repo_Commit=held.commit, Content_Length=str(len(content))
            )
        else:
            if order:
                held.orders[name].pop(0)
            self._body(content, order)

    def _body(self, content: bytes, order: str) -> None:
        if order == "wrong":
            content = bytes(255 - byte for byte in content)
        elif order == "pointer":
            content = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".ljust(
                len(content) // 2, b"\n"
            )
        first = (
            int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            if "Range" in self.headers
            else 0
        )
        rest = content[first:]
        span = {"Content_Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if first else {}
        if order in ("cut", "stall", "spoilt"):
            half = rest[: len(rest) // 2]
            self._send(
                206 if first else 200,
                bytes(len(half)) if order == "spoilt" else half,
                Content_Length=str(len(rest)),
                **span,
            )
            self.wfile.flush()
            if order == "stall":
                self.held.released.wait(20)
            self.close_connection = True
        else:
            self._send(206 if first else 200, rest, **span)

    def _index(self, path: str) -> None:
        folder = self.held.index
        assert folder is not None
        if path.startswith("/files/"):
            self._send(200, (folder / path.removeprefix("/files/")).read_bytes())
            return
        project = path.removeprefix("/simple/").strip("/")
        found = [
            one
            for one in sorted(folder.iterdir())
            if one.name.split("-")[0].replace("_", "-").lower() == project
        ]
        links = "".join(
            f'<a href="/files/{one.name}#sha256={sha256(one.read_bytes())}">{one.name}</a>' for one in found
        )
        self._send(
            200 if found else 404,
            f"<!DOCTYPE html><html><body>{links}</body></html>".encode(),
            Content_Type="text/html",
        )
