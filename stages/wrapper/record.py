"""Records: one in-toto statement with a SLSA provenance predicate for each stage that has run.

The record holds the whole definition, so that its key can be computed again from the record alone.
"""

import json
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import digest_of, write_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:draftmill:stage:v1"
DEPENDENCY_KINDS = ("code", "inputs", "files")

Record = dict[str, Any]


def record_path(root: Path, profile: str, stage: str) -> Path:
    """Where a stage's record lies."""
    return root / "logs" / profile / f"{stage}.json"


def read_record(root: Path, profile: str, stage: str) -> Record | None:
    """Return a stage's record; None if it has none, or one that is not ours."""
    try:
        record = json.loads(record_path(root, profile, stage).read_text(encoding="utf-8"))
        whole = record["_type"] == STATEMENT_TYPE and definition_of(record)["stage"] == stage
        return record if whole and isinstance(subjects(record), dict) else None
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None


def subjects(record: Record) -> dict[str, str]:
    """Return file name, relative to the stage's folder, -> sha256."""
    return {subject["name"]: subject["digest"]["sha256"] for subject in record["subject"]}


def key_of(record: Record) -> str:
    """Return the key that the record states."""
    return str(record["predicate"]["runDetails"]["metadata"]["draftmill_key"])


def run_of(record: Record) -> dict[str, Any]:
    """Return what is known of the run: profile, runner, locked, versions, threads, seconds, metrics, ..."""
    return dict(record["predicate"]["runDetails"]["metadata"]["draftmill_run"])


def definition_of(record: Record) -> dict[str, Any]:
    """Put the definition together again from a record."""
    build = record["predicate"]["buildDefinition"]
    definition = {**build["externalParameters"], **build["internalParameters"]}
    for kind in DEPENDENCY_KINDS:
        definition[kind] = {}
    for dependency in build["resolvedDependencies"]:
        kind, _, name = dependency["name"].partition("/")
        definition[kind][name] = dependency["digest"]["sha256"]
    return definition


def make_record(definition: dict[str, Any], outputs: dict[str, str], run: dict[str, Any]) -> Record:
    """Compose the statement.

    Args:
        definition: what `stages.wrapper.definition.define` returned.
        outputs: subject name -> sha256.
        run: facts of the run that are not part of the definition: `profile`, `runner`, `started`,
            `finished`, `log` (relative to the repository), `seconds`, `metrics`, ...
    """
    dependencies = [{"name": f"{kind}/{name}", "digest": {"sha256": digest}}
                    for kind in DEPENDENCY_KINDS for name, digest in sorted(definition[kind].items())]
    outer = {name: definition[name] for name in ("stage", "config", "seed", "device")}
    inner = {name: definition[name] for name in definition if name not in {*outer, *DEPENDENCY_KINDS}}
    key = digest_of(definition)
    metadata = {"invocationId": f"{key[:16]}-{run['started']}", "startedOn": run["started"],
                "finishedOn": run["finished"], "draftmill_key": key, "draftmill_run": run}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": outputs[name]}} for name in sorted(outputs)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {"buildType": BUILD_TYPE, "externalParameters": outer,
                                "internalParameters": inner, "resolvedDependencies": dependencies},
            "runDetails": {"builder": {"id": f"urn:draftmill:runner:{run['runner']}"}, "metadata": metadata,
                           "byproducts": [{"name": "log", "uri": run["log"]}]},
        },
    }


def write_record(root: Path, profile: str, record: Record) -> None:
    """Write a record atomically in its place.

    Raises:
        UserError: its key does not follow from its definition (a value that JSON cannot hold exactly).
    """
    stage = record["predicate"]["buildDefinition"]["externalParameters"]["stage"]
    if digest_of(definition_of(record)) != key_of(record):
        raise UserError(f"{stage}: the record's key cannot be computed from the record; check its config")
    write_json(record_path(root, profile, stage), record)
