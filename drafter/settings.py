"""What the server is told: the folder's serving.json, the environment, and the sums of what it loads."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from drafter import logs
from drafter.config import MOST

WEIGHTS = "model.safetensors"
SERVING = "serving.json"
SUMS = "SHA256SUMS"
DTYPES = ("float32", "bfloat16")
PLAIN = "DRAFTER_PLAIN"  # set by the supervisor for a server that is to do without kernels and graphs


@dataclass(frozen=True)
class Settings:
    """serving.json: the limits that were packed with the weights.

    Attributes:
        draft_tokens: ids a draft has.
        context_tokens: ids a request is drafted from; of a longer one the last.
        max_batch: requests drafted in one step.
        token_limit: ids that are tokens; embeddings from here on are never proposed.
        dtype_cpu: the compute type where there is no GPU.
        request_max_bytes: a longer body is refused with 413.
        slots: conversations whose keys and values are kept; 0 for as many as max_batch.
    """

    token_limit: int
    draft_tokens: int = 16
    context_tokens: int = 2048
    max_batch: int = 32
    dtype_cpu: str = "float32"
    request_max_bytes: int = 1_048_576
    slots: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dtype_cpu":
                if value not in DTYPES:
                    raise ValueError(f"dtype_cpu is {value!r}; allowed are {' and '.join(DTYPES)}")
            elif type(value) is not int or not (field.name != "slots") <= value < MOST:
                raise ValueError(f"{field.name} is {value!r}; it must be a positive integer")
        if 0 < self.slots < self.max_batch:
            raise ValueError(f"slots is {self.slots}; it must be 0 or at least max_batch ({self.max_batch})")

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Read FOLDER/serving.json.

        Raises:
            ValueError: it is missing, no JSON, or has a key or value that is not allowed; says which.
        """
        path = folder / SERVING
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path} is missing; `make pack` writes it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not {"token_limit"} <= set(values) <= known:
            raise ValueError(f"{path} must hold token_limit and may hold {', '.join(sorted(known))}, no more")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Address:
    """Where to listen, and the name to answer by."""

    host: str
    port: int
    model_name: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Address":
        """Read HOST (127.0.0.1), PORT (8000; 0 for any free one) and MODEL_NAME (submission).

        Raises:
            ValueError: PORT is no port.
        """
        text = environment.get("PORT") or "8000"
        if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
            raise ValueError(f"PORT is {text!r}; it must be an integer from 0 to 65535")
        host = environment.get("HOST") or "127.0.0.1"
        return cls(host, int(text), environment.get("MODEL_NAME") or "submission")


@dataclass(frozen=True)
class Sums:
    """The sha256 of what is served: weights, serving.json, and the list of sums they were checked against."""

    weights: str
    serving: str
    sums: str | None

    @classmethod
    def check(cls, folder: Path) -> "Sums":
        """Hash weights and settings and hold them to FOLDER/SHA256SUMS, where there is one.

        Raises:
            ValueError: a file is missing or its bytes are not those that were packed.
        """
        listed = _listed(folder / SUMS)
        if listed is None:
            logs.event(logging.WARNING, "files are not checked",
                       reason=f"{folder / SUMS} is missing: only tensors have sums of their own")
        digests = {name: _sha256(folder / name) for name in (WEIGHTS, SERVING)}
        for name, digest in digests.items():
            if listed is not None and listed.get(name) != digest:
                raise ValueError(
                    f"{folder / name} is damaged: sha256 {digest}, {SUMS} says "
                    f"{listed.get(name, 'nothing of it')}; copy the folder again"
                )
        return cls(digests[WEIGHTS], digests[SERVING], None if listed is None else _sha256(folder / SUMS))


def _listed(path: Path) -> dict[str, str] | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: no text in UTF-8 ({error}); copy the folder again") from None
    rows = [line.split(maxsplit=1) for line in lines if line.strip()]
    return {row[-1].removeprefix("*").removeprefix("./"): row[0] for row in rows}


def require(path: Path) -> Path:
    """Return the path of a file that must be there.

    Raises:
        ValueError: it is not; says what to do.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the folder again or run `make pack`")
    return path


def _sha256(path: Path) -> str:
    with require(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
