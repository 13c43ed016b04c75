"""Small trainers in this process, for the tests of training and of what is packed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config, small_decoder

from stages.job import Job
from stages.profile import Training
from stages.training.rows import Row, Rows
from stages.training.trainer import Trainer

SETTINGS = Training(dtype="float32", steps=8, batch_tokens=48, learning_rate=1e-2, warmup_steps=2,
                    max_row_tokens=40)


@pytest.fixture(autouse=True)
def own_settings_of_torch() -> Iterator[None]:
    """A trainer makes torch deterministic for its whole process; other tests need not be."""
    yield
    torch.use_deterministic_algorithms(False)


def make_job(folder: Path) -> Job:
    """A stage's job with all its places under a folder."""
    (folder / "work").mkdir(parents=True, exist_ok=True)
    return Job("distill", None, {}, folder, folder / "work", folder, 3, "cpu", folder / "distill.log",
               checkpoint_s=0)


def as_rows(rows: list[Row]) -> Rows:
    """The same rows as a teacher's shard holds them."""
    parts = {"prompt": [row.prompt for row in rows], "continuation": [row.continuation for row in rows]}
    offsets = {name: torch.tensor([0, *map(len, texts)]).cumsum(0) for name, texts in parts.items()}
    return Rows([{
        "prompt_ids": torch.cat(parts["prompt"]), "prompt_offsets": offsets["prompt"],
        "continuation_ids": torch.cat(parts["continuation"]), "continuation_offsets": offsets["continuation"],
        "topk_ids": torch.cat([row.topk_ids for row in rows]),
        "topk_logprobs": torch.cat([row.topk_logprobs for row in rows]),
    }])  # fmt: skip


def make_trainer(folder: Path, settings: Training = SETTINGS, kind: type[Trainer] = Trainer,
                 **view: Any) -> Trainer:
    """A trainer of a small decoder whose seed is 2."""
    start = dict(small_decoder(seed=2).named_parameters())
    return kind(make_job(folder), settings, small_config(), start, **view)
