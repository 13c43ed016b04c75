"""The log of downloads: every attempt, the failures and the successes, without hosts or secrets.

A row's `status` is `ok` (came, and hashed right), `failed`, or `found` (was there, and hashed right).
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from stages.files import whole_rows
from stages.upstream.pip import without_addresses
from stages.wrapper.redaction import hide_secrets

DOWNLOADS = "downloads.jsonl"


class Downloads:
    """Appends to vendor/downloads.jsonl, which lives as long as the files; failures stay in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8", errors="replace") as stream:
            stream.seek(0)
            text = stream.read()
            if text and not text.endswith("\n"):  # a full disk cut a row off
                stream.write("\n")
        self._told = set(files_told(text))

    def succeeded(self, uri: str, revision: str, *, size: int, sha256: str, method: str) -> None:
        """Log a file that came whole and hashed right; `size` in bytes."""
        self._append(uri, revision, "ok", bytes=size, sha256=sha256, method=method)
        self._told.add((uri, sha256))

    def found(self, uri: str, revision: str, *, size: int, sha256: str) -> None:
        """Log a file that lies there and hashes right, unless the log tells of it; `size` in bytes."""
        if (uri, sha256) not in self._told:
            self._append(uri, revision, "found", bytes=size, sha256=sha256)
            self._told.add((uri, sha256))

    def failed(
        self,
        uri: str,
        revision: str,
        reason: str,
        *,
        http_status: int | None = None,
        size: int | None = None,
        sha256: str | None = None,
    ) -> None:
        """Log an attempt that failed: what was said, and what came if something did."""
        self._append(
            uri,
            revision,
            "failed",
            reason=without_addresses(hide_secrets(reason)),
            http_status=http_status,
            bytes=size,
            sha256=sha256,
        )

    def _append(self, uri: str, revision: str, status: str, **fields: object) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row: dict[str, object] = {"time": now, "uri": uri, "revision": revision, "status": status}
        row |= {name: value for name, value in fields.items() if value is not None}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def files_told(text: str) -> Iterator[tuple[str, str]]:
    """Yield URI and sha256 of every file that a log has as there; what is no whole row is passed over."""
    for row in whole_rows(text):
        uri, sha256 = row.get("uri"), row.get("sha256")
        if row.get("status", "failed") != "failed" and isinstance(uri, str) and isinstance(sha256, str):
            yield uri, sha256
