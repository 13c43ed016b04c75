"""Show what a packed file holds, tensor by tensor; every tensor is decoded as serving decodes it.

Usage: python -m drafter.inspect [FOLDER or FILE] [--against FILE] [--json]
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter import codecs, weights
from drafter.codecs import Parts, Settings, zstd
from drafter.settings import WEIGHTS

STEP_PARTS = (".steps", ".scales", ".scale")
COLUMNS = ("tensor", "codec", "shape", "bytes", "bits", "zeros", "step: least", "median", "largest", "error")


@dataclass(frozen=True)
class Row:
    """What is told of one tensor.

    Attributes:
        codec: with its options.
        size_bytes: of all stored parts.
        bits_per_weight: the same by weight.
        zeros_share: of the decoded weights.
        steps: least, median and largest magnitude of steps or scales; None where the codec has none.
        error_db: squared error over the reference's squares, in dB; None without a reference, or where
            nothing differs.
    """

    name: str
    codec: str
    shape: list[int]
    size_bytes: int
    bits_per_weight: float
    zeros_share: float
    steps: tuple[float, float, float] | None
    error_db: float | None


def inspect(path: Path, reference: Path | None = None) -> Iterator[Row]:
    """Yield a row for each tensor, in the plan's order.

    Args:
        path: a packed file.
        reference: a plain safetensors file of the same names, e.g. what the drafter was packed from.

    Raises:
        ValueError: a file is damaged, or the reference lacks a tensor or has it in another shape.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            _, plan, sums = weights.read_header(path, stored.metadata())
            names = set(stored.keys())
            for name, settings in plan.items():
                parts = weights.parts_of(stored, name, names)
                for suffix, part in parts.items():
                    for check in weights.sum_checks(path, name + suffix, part, sums):
                        check()
                decoded = _decoded(path, name, parts, settings)
                compared = _read(reference, name, decoded) if reference else None
                yield _row(name, settings, parts, decoded, compared)
    except (SafetensorError, OSError) as error:
        raise ValueError(weights.not_whole(path, error)) from error


def _decoded(path: Path, name: str, parts: Parts, settings: Settings) -> Tensor:
    try:
        return codecs.decode(parts, settings)
    except weights.DAMAGE as error:
        raise ValueError(f"{path}: tensor {name} does not decode as {settings['codec']}: {error}") from error


def _row(name: str, settings: Settings, parts: Parts, decoded: Tensor, reference: Tensor | None) -> Row:
    size = sum(part.nbytes for part in parts.values())
    options = [f"g{settings['group']}" if "group" in settings else "",
               f"rank {settings['rank']}" if settings.get("rank") else "",
               "zstd" if settings.get("zstd") else ""]  # fmt: skip
    return Row(
        name, " ".join([settings["codec"], *filter(None, options)]), list(decoded.shape), size,
        size * 8 / decoded.numel(), float((decoded == 0).float().mean()), _steps(parts, settings),
        None if reference is None else _error_db(decoded, reference),
    )  # fmt: skip


def _steps(parts: Parts, settings: Settings) -> tuple[float, float, float] | None:
    if settings.get("zstd"):
        parts = zstd.decompress(parts, codecs.layout(settings), settings)
    found = next((parts[suffix] for suffix in STEP_PARTS if suffix in parts), None)
    if found is None:
        return None
    steps = found.float().abs().flatten()
    return float(steps.min()), float(steps.median()), float(steps.max())


def _error_db(decoded: Tensor, reference: Tensor) -> float | None:
    error, power = (decoded - reference).square().sum(), reference.square().sum()
    return float(10 * torch.log10(error / power)) if error > 0 else None


def _read(path: Path, name: str, decoded: Tensor) -> Tensor:
    try:
        with safe_open(path, framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(name).float()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: tensor {name} cannot be read from it ({error})") from error
    if tensor.shape != decoded.shape:
        raise ValueError(f"{path}: tensor {name}: expected shape {list(decoded.shape)}, found "
                         f"{list(tensor.shape)}")
    return tensor


def _cells(row: Row) -> list[str]:
    steps = ["" if row.steps is None else f"{step:.3g}" for step in row.steps or ("", "", "")]
    error = "" if row.error_db is None else f"{row.error_db:.1f} dB"
    return [row.name, row.codec, "x".join(map(str, row.shape)), f"{row.size_bytes:,}",
            f"{row.bits_per_weight:.3f}", f"{row.zeros_share:.1%}", *steps, error]  # fmt: skip


def _table(rows: list[Row]) -> Iterator[str]:
    cells = [list(COLUMNS), *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    for line in cells:
        padded = [cell.ljust(width) if column < 3 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True))]
        yield "  ".join(padded).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or JSON; return 0, or 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m drafter.inspect", description="Show packed weights.")
    parser.add_argument("place", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent,
                        help="a folder with model.safetensors, or a packed file (default: this copy's own)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="plain weights to compare with")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    options = parser.parse_args(argv)
    path = options.place / WEIGHTS if options.place.is_dir() else options.place
    try:
        rows = []
        for row in inspect(path, options.against):
            rows.append(row)
            if options.json:
                print(json.dumps(asdict(row)))
    except ValueError as error:
        print(f"drafter: {error}", file=sys.stderr)
        return 2
    if not options.json:
        size, count = sum(row.size_bytes for row in rows), sum(_count(row.shape) for row in rows)
        print("\n".join(_table(rows)))
        print(f"{len(rows)} tensors, {count:,} weights in {size:,} bytes: {size * 8 / count:.3f} bits a "
              f"weight; the file with its header {path.stat().st_size:,}")
    return 0


def _count(shape: list[int]) -> int:
    return int(torch.Size(shape).numel())


if __name__ == "__main__":
    sys.exit(main())
