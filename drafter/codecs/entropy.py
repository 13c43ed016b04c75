"""entropy: uniform codes, one step a row, entropy-coded in classes of rows of like scale.

code = round(weight / step), without clipping. Rows whose codes have the same rms, to half an octave, are
coded together, so that one table fits them. A block is a run of rows of one class; its codes become digits
and zstd frames (digits.py). Which digits suit a class is settled by coding some of its rows with each.
Measured rates: benchmarks/results/bits-*.json.

`.codes` is a run of sections, each one zstd frame behind its length (uint32): first the class of every row
(uint8, [rows]), then for each block a head (`HEAD`) and the frames of digits, escapes' gaps, escapes' codes.
"""

import struct
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter import threads
from drafter.codecs import Decoding, Layout, Parts, Settings, row_blocks
from drafter.codecs.digits import DIGITS, HEAD, Block, Digitised, coded, digitised, frame, table
from drafter.codecs.rows import inverse, nonzero_steps
from drafter.codecs.zstd import expand, from_bytes

LARGEST_CODE = 32767
COUNTED = 1024  # codes told apart when bits are estimated
LENGTH = struct.Struct("<I")
TRIED_CODES = 1 << 17  # of each class, to find its digits
COUNTED_CODES = 1 << 22  # of each matrix, to find its classes
MOST_THREADS = 64
CLASS_COST_BITS = 900  # of a block's head and tables, about
OCTAVE_SHARE = 2  # classes an octave of the codes' rms


def layout(settings: Settings) -> Layout:
    """`.codes`: sections, as long as the coding made them. `.steps`: a step a row."""
    return {".codes": ((-1,), torch.uint8), ".steps": ((settings["shape"][0],), torch.bfloat16)}


def to_codes(weight: Tensor, steps: Tensor) -> Tensor:
    """Return round(weight / step) in float32, at most LARGEST_CODE in magnitude; 0 where the step is 0.

    Args:
        weight: float32, [rows, columns].
        steps: bfloat16, [rows].
    """
    return (weight * inverse(steps)[:, None]).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)


def encode(weight: Tensor, _settings: Settings, side: Parts) -> Parts:
    """Quantise [rows, columns] float32 by the planned steps (`side["steps"]`, [rows]) and code it.

    Raises:
        ValueError: no steps were planned, one is negative or not finite, or a row would not decode to
            finite numbers.
    """
    if "steps" not in side:
        raise ValueError("the entropy codec needs a planned step for each row")
    steps = nonzero_steps(side["steps"])
    if not bool((torch.isfinite(steps) & (steps >= 0)).all()):
        raise ValueError("a planned step is negative or not finite")
    codes = to_codes(weight, steps).to(torch.int16)
    ends = (codes.abs().amax(1) * steps.float()).to(torch.bfloat16)
    if not bool(torch.isfinite(ends).all()):
        raise ValueError(f"row {int((~torch.isfinite(ends)).nonzero()[0])}: rounds to what is not finite")
    classes = row_classes(codes)
    head = frame(classes.numpy().tobytes())
    sections = [LENGTH.pack(len(head)), head, *_coded_blocks(codes, classes)]
    return {".codes": from_bytes(b"".join(sections)), ".steps": steps.cpu()}


def blocks(parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
    """Codes times steps, float32; the product of two short numbers is exact.

    Raises:
        ValueError: the sections are cut, or do not add up to the shape.
    """
    rows, columns = settings["shape"]
    steps = parts[".steps"].float()
    if not bool(torch.isfinite(steps).all()):
        row = int((~torch.isfinite(steps)).nonzero()[0])
        raise ValueError(f"row {row}: its step is not a finite number")
    reader = _Reader(parts[".codes"])
    classes = expand(reader.section(*LENGTH.unpack(reader.head(LENGTH.size))), rows)
    order, spans = _spans(classes, columns)
    steps, placed = steps[order].to(device), order.to(device)  # once a tensor, not once a block
    tables = [table(digits, device) for digits in DIGITS]
    for _, span in spans:
        kind, escapes, *lengths = HEAD.unpack(reader.head(HEAD.size))
        size = (span.stop - span.start) * columns
        if kind >= len(DIGITS) or escapes > size:
            raise ValueError("a block's head is damaged")
        first, last = int(order[span.start]), int(order[span.stop - 1])
        together = last - first == span.stop - span.start - 1  # rows rise within a class
        yield Block(DIGITS[kind], tables[kind], escapes, [reader.section(length) for length in lengths],
                     slice(first, last + 1) if together else placed[span], steps[span], size)
    reader.end()


def row_classes(codes: Tensor) -> Tensor:
    """Return the class of each row, uint8 [rows] on the host, numbered from 0 in rising scale.

    Rows start in half-octaves of their codes' rms; neighbours are joined as long as that costs fewer bits
    than a block's head and table.
    """
    return _classed(codes)[0]


def code_bits(codes: Tensor) -> float:
    """Return the ideal bits of a matrix's codes, coded in classes of rows, tables included; an estimate.

    Args:
        codes: integers of any type, [rows, columns].
    """
    costs = _classed(codes)[1]
    return sum(costs) + CLASS_COST_BITS * len(costs)


def _classed(codes: Tensor) -> tuple[Tensor, list[float]]:
    """Return the rows' classes, see `row_classes`, and the ideal bits of each class's codes."""
    rms = codes.float().square().mean(1).sqrt()
    octaves = torch.where(rms > 0, (rms.log2() * OCTAVE_SHARE).round(), -1000).to(torch.int32)
    _, own = torch.unique(octaves, return_inverse=True)
    counts = _histograms(codes, own)
    groups = [[index] for index in range(len(counts))]
    costs = [_bits(row) for row in counts]
    joined = [_bits(one + other) for one, other in pairwise(counts)]
    while joined:
        more = [bits - costs[i] - costs[i + 1] for i, bits in enumerate(joined)]
        best = min(range(len(more)), key=more.__getitem__)
        if more[best] > CLASS_COST_BITS:
            break
        counts[best] += counts.pop(best + 1)
        groups[best] += groups.pop(best + 1)
        costs[best : best + 2] = [joined.pop(best)]
        for i in range(max(0, best - 1), min(best + 1, len(joined))):
            joined[i] = _bits(counts[i] + counts[i + 1])
    number = torch.empty(sum(map(len, groups)), dtype=torch.uint8)
    for index, group in enumerate(groups):
        number[group] = index
    return number[own.cpu()], costs


def _histograms(codes: Tensor, classes: Tensor) -> list[NDArray[np.float64]]:
    """Counts of the codes up to COUNTED in magnitude (the ends: and beyond) for each class.

    Of a large matrix some columns are counted, each for several. Codes that never occur are left out.
    """
    some = codes[:, :: max(1, codes.numel() // COUNTED_CODES)]
    kinds, width = int(classes.max()) + 1, 2 * COUNTED + 1
    index = some.clamp(-COUNTED, COUNTED).to(torch.int32).add_(COUNTED)
    index += classes.to(torch.int32)[:, None] * width
    counted = torch.bincount(index.flatten(), minlength=kinds * width).cpu().numpy().reshape(kinds, width)
    return list(counted[:, counted.any(0)] * (codes.numel() / some.numel()))


def _bits(counts: NDArray[np.float64]) -> float:
    present = counts[counts > 0]
    total = present.sum()
    return float(total * np.log2(total) - (present * np.log2(present)).sum()) if total else 0.0


def _spans(classes: Tensor, columns: int) -> tuple[Tensor, list[tuple[int, slice]]]:
    """Return the rows in the order of their classes, and the class and run of that order of every block."""
    spans, start = [], 0
    for index, rows in enumerate(torch.bincount(classes).tolist()):
        spans += [(index, slice(start + part.start, start + part.stop)) for part in row_blocks(rows, columns)]
        start += rows
    return torch.argsort(classes, stable=True), spans


def _coded_blocks(codes: Tensor, classes: Tensor) -> Iterator[bytes]:
    """Yield the sections of all blocks. A GPU finds the digits for the threads, which compress them."""
    order, spans = _spans(classes, codes.shape[1])
    order = order.to(codes.device)
    kinds = [_kinds(codes, rows) for rows in torch.split(order, torch.bincount(classes).tolist())]

    def digits(block: tuple[int, slice]) -> Digitised:
        index, span = block
        flat = codes[order[span]].flatten()
        return next(found for kind in kinds[index] if (found := digitised(flat, kind)))

    with threads.pool(MOST_THREADS) as pool:
        if codes.is_cuda:
            yield from pool.map(coded, map(digits, spans))
        else:
            yield from pool.map(lambda block: coded(digits(block)), spans)


def _kinds(codes: Tensor, rows: Tensor) -> list[int]:
    """Return the kinds of digits, best first, by what some rows of a class take; the last takes any code."""
    some = codes[rows[:: max(1, len(rows) * codes.shape[1] // TRIED_CODES)]].flatten()
    tried = {kind: found for kind in range(len(DIGITS)) if (found := digitised(some, kind))}
    sizes = {kind: len(coded(found)) for kind, found in tried.items()}
    return [*sorted(sizes, key=sizes.__getitem__), len(DIGITS) - 1]


class _Reader:
    """Takes heads and sections off a part's bytes, and refuses to run over its end."""

    def __init__(self, content: Tensor) -> None:
        self.content, self.place = content, 0

    def section(self, size: int) -> Tensor:
        taken = self.content[self.place : self.place + size]
        if len(taken) != size:
            raise ValueError(".codes ends before its blocks do")
        self.place += size
        return taken

    def head(self, size: int) -> bytes:
        return self.section(size).numpy().tobytes()

    def end(self) -> None:
        if self.place != len(self.content):
            raise ValueError(f"{len(self.content) - self.place} bytes lie behind the last block of .codes")
