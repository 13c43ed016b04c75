"""entropy: uniform codes, one step a row, entropy-coded in classes of rows of like scale.

code = round(weight / step), without clipping. Rows whose codes have the same rms, to half an octave, are
coded together, so that one table fits them. A block is a run of rows of one class; its codes become digits,
several to a byte, and the bytes are coded by zstd, whose Huffman stage does the work (matches are all but not
looked for: at low rates chance ones cost more than they save). A code beyond the digits is an escape: its
place holds a 0, and gap and code stand apart. Which digits suit a class is settled by coding some of its rows
with each. Measured rates: benchmarks/results/bits-*.json.

`.codes` is a run of sections, each one zstd frame behind its length (uint32): first the class of every row
(uint8, [rows]), then for each block a head (`HEAD`) and the frames of digits, escapes' gaps, escapes' codes
(int8 if all are short, else int16: all low bytes, then all high ones).
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from backports import zstd
from numpy.typing import NDArray
from torch import Tensor

from drafter import threads
from drafter.codecs import Decoding, Layout, Parts, Placed, Settings, row_blocks
from drafter.codecs.rows import inverse, nonzero_steps
from drafter.codecs.zstd import expand, from_bytes, to_bytes

LARGEST_CODE = 32767
COUNTED = 1024  # codes told apart when bits are estimated
HEAD = struct.Struct("<BIIII")  # digits, escapes, bytes of the three frames
LENGTH = struct.Struct("<I")
SECOND = 255  # a gap byte that says: 255 more, and go on
SHORT = 127  # the largest escape that one byte holds
MOST_ESCAPES = 0.04
TRIED_CODES = 1 << 17  # of each class, to find its digits
COUNTED_CODES = 1 << 22  # of each matrix, to find its classes
MOST_THREADS = 64
CLASS_COST_BITS = 900  # of a block's head and tables, about
OCTAVE_SHARE = 2  # classes an octave of the codes' rms
OPTIONS: dict[int, int] = {
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.min_match: 7,
    zstd.CompressionParameter.window_log: 18,
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.chain_log: 6,
    zstd.CompressionParameter.search_log: 1,
    zstd.CompressionParameter.target_length: 1 << 17,  # strides, so that next to no match is looked at
    1002: 1,  # ZSTD_c_literalCompressionMode = enabled; by default strides leave literals as they are
}


@dataclass(frozen=True)
class Digits:
    """How codes become bytes: `count` digits of base `base` to a byte, for codes from `low` upwards."""

    base: int
    count: int
    low: int


DIGITS = (Digits(3, 5, -1), Digits(5, 3, -2), Digits(15, 2, -7), Digits(256, 1, -128))


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
    head = _frame(classes.numpy().tobytes())
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
    tables = [_table(digits, device) for digits in DIGITS]
    for _, span in spans:
        kind, escapes, *lengths = HEAD.unpack(reader.head(HEAD.size))
        size = (span.stop - span.start) * columns
        if kind >= len(DIGITS) or escapes > size:
            raise ValueError("a block's head is damaged")
        first, last = int(order[span.start]), int(order[span.stop - 1])
        together = last - first == span.stop - span.start - 1  # rows rise within a class
        yield _Block(DIGITS[kind], tables[kind], escapes, [reader.section(length) for length in lengths],
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

    def digits(block: tuple[int, slice]) -> _Digitised:
        index, span = block
        flat = codes[order[span]].flatten()
        return next(found for kind in kinds[index] if (found := _digitised(flat, kind)))

    with threads.pool(MOST_THREADS) as pool:
        if codes.is_cuda:
            yield from pool.map(_coded, map(digits, spans))
        else:
            yield from pool.map(lambda block: _coded(digits(block)), spans)


def _kinds(codes: Tensor, rows: Tensor) -> list[int]:
    """Return the kinds of digits, best first, by what some rows of a class take; the last takes any code."""
    some = codes[rows[:: max(1, len(rows) * codes.shape[1] // TRIED_CODES)]].flatten()
    tried = {kind: found for kind in range(len(DIGITS)) if (found := _digitised(some, kind))}
    sizes = {kind: len(_coded(found)) for kind, found in tried.items()}
    return [*sorted(sizes, key=sizes.__getitem__), len(DIGITS) - 1]


@dataclass(frozen=True)
class _Digitised:
    """A block before compression, on the host: digits several to a byte, and its escapes."""

    kind: int
    packed: Tensor
    where: Tensor
    escapes: Tensor


def _digitised(codes: Tensor, kind: int) -> _Digitised | None:
    """Turn a block's codes, int16 [size], into digits; None where too many are beyond them."""
    digits = DIGITS[kind]
    values = codes - digits.low
    outside = (values < 0) | (values >= digits.base)
    where = outside.nonzero()[:, 0]
    if len(where) > MOST_ESCAPES * len(codes) and digits.base < 256:
        return None
    values = values.masked_fill_(outside, -digits.low).to(torch.uint8)
    missing = -len(codes) % digits.count
    planes = torch.nn.functional.pad(values, (0, missing), value=-digits.low).reshape(-1, digits.count)
    packed = planes[:, 0]
    for place in range(1, digits.count):
        packed = packed * digits.base + planes[:, place]
    return _Digitised(kind, packed.cpu(), where.cpu(), codes[where].cpu())


def _coded(block: _Digitised) -> bytes:
    frames = [_frame(to_bytes(block.packed)), b"", b""]
    if len(block.where):
        escapes = block.escapes.numpy()
        short = np.abs(escapes).max() <= SHORT
        planes = escapes.astype(np.int8) if short else escapes.astype("<i2").view(np.uint8).reshape(-1, 2).T
        frames[1:] = [_frame(_gaps(block.where.numpy())), _frame(planes.tobytes())]
    return HEAD.pack(block.kind, len(block.where), *map(len, frames)) + b"".join(frames)


def _frame(raw: bytes | memoryview) -> bytes:
    return zstd.compress(raw, options=OPTIONS)


def _gaps(places: NDArray[np.int64]) -> bytes:
    """Distances less 1 as bytes; a byte SECOND adds 255 and goes on."""
    gaps = np.diff(places, prepend=-1) - 1
    more = gaps // SECOND
    written = np.full(int(more.sum()) + len(gaps), SECOND, dtype=np.uint8)
    written[np.cumsum(more + 1) - 1] = gaps % SECOND
    return written.tobytes()


@dataclass(frozen=True)
class _Block:
    """The job of one block as it is stored.

    Attributes:
        table: the digits' codes of every byte, float32 [256, count], on the device.
        frames: of digits, gaps and codes; uint8, on the host.
        rows: of the matrix.
        steps: theirs, float32 [rows], on the device.
        size: the number of codes.
    """

    digits: Digits
    table: Tensor
    escapes: int
    frames: list[Tensor]
    rows: slice | Tensor
    steps: Tensor
    size: int

    def __call__(self) -> Callable[[], Placed]:
        """Expand the frames, and return what makes weights of them on the device."""
        pinned = self.steps.is_cuda
        packed = expand(self.frames[0], -(-self.size // self.digits.count), pinned=pinned)
        return partial(self._values, packed, self._escaped(pinned) if self.escapes else None)

    def _values(self, packed: Tensor, escaped: tuple[Tensor, Tensor] | None) -> Placed:
        device = self.steps.device
        packed = packed.to(device, non_blocking=True)
        if self.digits.count == 1:
            codes = packed.float().add_(self.digits.low)
        elif self.digits.count == 2:  # two float32 are moved as one number
            codes = self.table.view(torch.int64)[:, 0].index_select(0, packed.int()).view(torch.float32)
        else:
            codes = self.table.index_select(0, packed.int()).flatten()
        codes = codes[: self.size]
        if escaped:
            where, values = escaped
            codes[where.to(device, non_blocking=True)] = values.to(device, non_blocking=True)
        return self.rows, codes.view(len(self.steps), -1).mul_(self.steps[:, None])

    def _escaped(self, pinned: bool) -> tuple[Tensor, Tensor]:
        """Return the places, int64, and codes, float32, of the escapes, on the host."""
        gaps = expand(self.frames[1], self.size + self.escapes, exact=False).numpy()
        if len(gaps) == self.escapes:  # no gap goes on
            where = np.cumsum(gaps, dtype=np.int64)
        else:
            where = np.cumsum(gaps, dtype=np.int64)[gaps != SECOND]
        if len(where) != self.escapes or where[-1] + self.escapes > self.size:
            raise ValueError("a block's escapes do not add up")
        where += np.arange(self.escapes)
        planes = expand(self.frames[2], 2 * self.escapes, exact=False)
        if len(planes) == self.escapes:
            values = planes.view(torch.int8).float()
        elif len(planes) == 2 * self.escapes:
            low, high = planes.view(2, -1)
            values = high.view(torch.int8).float().mul_(256).add_(low)
        else:
            raise ValueError("a block's escapes do not add up")
        found = torch.from_numpy(where)
        return (found.pin_memory(), values.pin_memory()) if pinned else (found, values)


def _table(digits: Digits, device: str) -> Tensor:
    """The codes of every byte, float32 [256, count]."""
    numbers = torch.arange(256, dtype=torch.int32)
    powers = [digits.base**place for place in reversed(range(digits.count))]
    planes = [numbers // power % digits.base + digits.low for power in powers]
    return torch.stack(planes, dim=1).float().to(device)


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
