"""What a reviewer asks of a submission before anybody starts it: its declaration, its evidence, its sums."""

import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from stages.files import sha256_file
from stages.size import Survey
from stages.upstream.downloads import DOWNLOADS, files_told

DECLARATION = "architecture.json"
SUMS = "SHA256SUMS"
EVIDENCE = "evidence"
NEEDED_AT_TOP = (DECLARATION, "serve.sh", SUMS)
STRINGS = ("base_model", "base_revision")
FETCHED, TOLD = f"{EVIDENCE}/records/fetch.json", f"{EVIDENCE}/logs/{DOWNLOADS}"
EVIDENCE_LISTS = ("training_evidence_files", "inference_evidence_files")

_SUM = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](?:\./)?(?P<name>.+)")
# A commit or a content digest; a branch or a tag may move.
_IMMUTABLE = re.compile(r"[0-9a-f]{40}|sha256:[0-9a-f]{64}|none|from-scratch")


def review(found: Survey) -> list[str]:
    """Return what a reviewer would send back, a sentence each."""
    names = {file.name for file in found.files}
    wrong = [f"{name} is missing at the top" for name in NEEDED_AT_TOP if name not in names]
    if DECLARATION in names:
        wrong += _declaration(found, names)
    return [*wrong, *_sums(found, ""), *_sums(found, f"{EVIDENCE}/"), *_downloads(found)]


def _declaration(found: Survey, names: set[str]) -> Iterator[str]:
    path = next(file.path for file in found.files if file.name == DECLARATION)
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"{DECLARATION} is not JSON ({error})"
        return
    if not isinstance(declared, dict):
        yield f"{DECLARATION} is not a JSON object"
        return
    for key in STRINGS:
        if not (isinstance(declared.get(key), str) and declared[key].strip()):
            yield f"{DECLARATION}: {key} must be a text"
    revision = declared.get("base_revision")
    if isinstance(revision, str) and revision.strip() and not _IMMUTABLE.fullmatch(revision):
        yield (f"{DECLARATION}: base_revision {revision!r} is neither a 40-digit commit nor sha256:..., "
               "nor 'none' or 'from-scratch'")
    for key in EVIDENCE_LISTS:
        yield from _evidence(key, declared.get(key), names)


def _evidence(key: str, listed: Any, names: set[str]) -> Iterator[str]:
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        yield f"{DECLARATION}: {key} must be a list of file names, and not empty"
        return
    for name in listed:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            yield f"{DECLARATION}: {key} names {name}, which is outside the submission"
        elif path.as_posix() not in names:
            yield f"{DECLARATION}: {key} names {name}, which is not there"


def _sums(found: Survey, folder: str) -> Iterator[str]:
    """Hold the files below a folder ('' or 'evidence/') to its list of sums: each one listed, and right."""
    files = {file.name: file.path for file in found.files if file.name.startswith(folder)}
    sums = f"{folder}{SUMS}"
    if sums not in files:
        return
    listed = {}
    for number, line in enumerate(files[sums].read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = _SUM.fullmatch(line)
        if match is None:
            yield f"{sums}, line {number}: expected a sha256, two spaces and a name"
        else:
            listed[folder + match["name"]] = match["digest"]
    for name in sorted(listed.keys() - files.keys()):
        yield f"{sums} lists {name}, which is not there"
    # The evidence has times and logs in it and does not repeat: its sums are its own.
    apart = f"{EVIDENCE}/" if not folder else sums
    for name, path in files.items():
        if name in listed:
            if sha256_file(path) != listed[name]:
                yield f"{name} does not have the sha256 that {sums} lists"
        elif name != sums and not name.startswith(apart):
            yield f"{name} is not listed in {sums}"


def _downloads(found: Survey) -> Iterator[str]:
    """Hold what fetch's record lists to the log of downloads: each file came, or was there, by sha256."""
    paths = {file.name: file.path for file in found.files}
    if FETCHED not in paths:
        return
    try:
        subjects = json.loads(paths[FETCHED].read_text(encoding="utf-8"))["subject"]
        fetched = {subject["name"]: subject["digest"]["sha256"] for subject in subjects}
    except (ValueError, KeyError, TypeError):
        yield f"{FETCHED} is not a record"
        return
    log = paths[TOLD].read_text(encoding="utf-8", errors="replace") if TOLD in paths else ""
    told = {sha256 for _, sha256 in files_told(log)}
    for name in sorted(name for name, digest in fetched.items() if digest not in told):
        yield f"{TOLD} tells of no download of {name} with the sha256 that {FETCHED} lists"
