"""Files: digests, atomic writes, canonical JSON."""

from __future__ import annotations  # an older Python gets as far as the sentence

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def sha256_file(path: Path) -> str:
    """Return the hexadecimal sha256 of a file's bytes, read in chunks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical_json(value: object) -> bytes:
    """Serialise to the one JSON text that stands for a value: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(value: object) -> str:
    """Return the hexadecimal sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file beside its place and move it in, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write JSON for people and programs: sorted, indented, one trailing newline; atomic."""
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(path, text + "\n")


def read_json(path: Path) -> Any:
    """Return the value of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Write one JSON value a line (sorted keys, UTF-8); atomic."""
    lines = (json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) for row in rows)
    write_atomic(path, "".join(line + "\n" for line in lines))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file.

    Raises:
        ValueError: a line is not JSON; the message names file and line.
    """
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def whole_rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of a log; a line that a full disk has cut off is passed over."""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def link_or_copy(source: Path, place: Path) -> None:
    """Give a finished file a second name, or a copy where the file system has no links; replaces `place`."""
    place.unlink(missing_ok=True)
    try:
        place.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, place)


def files_under(folder: Path) -> list[str]:
    """Return the names of all files and links under a folder, relative to it, '/'-separated, sorted."""
    names = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        names += [(Path(parent) / name).relative_to(folder).as_posix() for name in files + links]
    return sorted(names)
