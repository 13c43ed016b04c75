"""Which rows an arm is trained on, and which layers it keeps."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter.model import causal, rotary_tables
from stages.errors import UserError
from stages.files import read_jsonl
from stages.training.rows import Row, Rows

INFLUENCE_ROWS = 64


class Part(Rows):
    """Some of the rows.

    Args:
        rows: all of them.
        numbers: which, int64 [part].
    """

    def __init__(self, rows: Rows, numbers: Tensor) -> None:
        self.rows, self.numbers = rows, numbers
        self.prompt_sizes = rows.prompt_sizes[numbers]
        self.continuation_sizes = rows.continuation_sizes[numbers]

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        """Return a row."""
        return self.rows[int(self.numbers[index])]


def parts(rows: Rows, prompts: Path) -> dict[str, Tensor]:
    """Return row numbers by name: "all", and "only X" and "all but X" for each source X.

    With a source left out there are fewer rows: as many as are then left are drawn, by a seed, in every case
    but "only".

    Args:
        rows: the teacher's.
        prompts: the file of the data stage that names each prompt's source.

    Raises:
        UserError: a row's prompt is not in the file.
    """
    names = sources_of(rows, prompts)
    held, found = np.array(names), {"all": np.arange(len(names))}
    for one in (counts := Counter(names)):
        found[f"only {one}"] = np.flatnonzero(held == one)
        if len(counts) > 1:
            found[f"all but {one}"] = np.flatnonzero(held != one)
    fewest = min(len(part) for name, part in found.items() if name.startswith("all"))
    for name, part in found.items():
        if name.startswith("all"):
            found[name] = np.sort(np.random.default_rng(0).permutation(part)[:fewest])
    return {name: torch.from_numpy(part) for name, part in found.items()}


def sources_of(rows: Rows, prompts: Path) -> list[str]:
    """Return the source of each row, known by its prompt.

    Raises:
        UserError: a row's prompt is not among them.
    """
    source = {np.array(row["prompt"], np.int32).tobytes(): row["source"] for row in read_jsonl(prompts)}
    try:
        return [source[rows[index].prompt.numpy().tobytes()] for index in range(len(rows))]
    except KeyError:
        raise UserError(f"{prompts} is not what the teacher continued; run make teacher again") from None


@torch.no_grad()
def influence(target: Any, rows: Rows) -> list[int]:
    """Return the layers by falling block influence: 1 - cosine of a layer's input and output, summed."""
    totals = torch.zeros(target.config.layers, dtype=torch.float64)
    device = target.head_weight.device
    for index in range(min(INFLUENCE_ROWS, len(rows))):
        row = rows[index * len(rows) // INFLUENCE_ROWS % len(rows)]
        tokens_1t = torch.cat((row.prompt, row.continuation)).long()[None].to(device)
        rotary = rotary_tables(torch.arange(tokens_1t.shape[1], device=device)[None], target.config)
        x_1td = target.model.embed_tokens(tokens_1t)
        for number, layer in enumerate(target.model.layers):
            y_1td = layer(x_1td, rotary, causal)
            totals[number] += float((1 - torch.cosine_similarity(x_1td, y_1td, dim=-1)).sum())
            x_1td = y_1td
    return totals.argsort(descending=True).tolist()
