"""entropy: uniform codes, one step a row, entropy-coded in classes of rows of like scale.

code = round(weight / step), without clipping. Rows whose codes have the same rms, to half an octave, are
coded together, so that one table fits them. A block is a run of rows of one class; its codes become digits,
several to a byte, and the bytes are coded by zstd, whose Huffman stage does the work (matches are all but not
looked for: at low rates chance ones cost more than they save). A code beyond the digits is an escape: its
place holds a 0, and gap and code stand apart. Which digits suit a block is settled by its size. Measured
rates: benchmarks/results/bits-*.json.

`.codes` is a run of sections, each one zstd frame behind its length (uint32): first the class of every row
(uint8, [rows]), then for each block a head (`HEAD`) and the frames of digits, escapes' gaps, escapes' codes.
"""

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from backports import zstd
from numpy.typing import NDArray
from torch import Tensor

from drafter.codecs import Decoding, Layout, Parts, Settings, row_blocks
from drafter.codecs.rows import inverse, nonzero_steps
from drafter.codecs.zstd import expand, from_bytes, to_bytes

LARGEST_CODE = 32767
COUNTED = 1024  # codes told apart when bits are estimated
HEAD = struct.Struct("<BIIII")  # digits, escapes, bytes of the three frames
LENGTH = struct.Struct("<I")
SECOND = 255  # a gap byte that says: 255 more, and go on
MOST_ESCAPES = 0.04
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
    classes, codes = row_classes(codes), codes.cpu()
    sections = [_frame(classes.numpy().tobytes())]
    sections[0] = LENGTH.pack(len(sections[0])) + sections[0]
    places = list(_places(classes, codes.shape[1]))
    with ThreadPoolExecutor() as pool:
        sections += pool.map(lambda rows: _pack(codes[rows].flatten().numpy()), places)
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
    reader = _Reader(memoryview(to_bytes(parts[".codes"])))
    classes = from_bytes(expand(reader.take(*LENGTH.unpack(reader.take(LENGTH.size))), rows))
    for places in _places(classes, columns):
        kind, escapes, *lengths = HEAD.unpack(reader.take(HEAD.size))
        if kind >= len(DIGITS) or escapes > len(places) * columns:
            raise ValueError("a block's head is damaged")
        frames = [reader.take(length) for length in lengths]
        block = _Block(DIGITS[kind], escapes, frames, len(places) * columns)
        yield partial(_decode, block, places, steps[places], device)
    reader.end()


def row_classes(codes: Tensor) -> Tensor:
    """Return the class of each row, uint8 [rows], numbered from 0 in rising scale.

    Rows start in half-octaves of their codes' rms; neighbours are joined as long as that costs fewer bits
    than a block's head and table.
    """
    rms = codes.float().square().mean(1).sqrt()
    octaves = torch.where(rms > 0, (rms.log2() * OCTAVE_SHARE).round(), -1000).to(torch.int32)
    _, own = torch.unique(octaves, return_inverse=True)
    counts = _histograms(codes, own)
    groups = [[index] for index in range(len(counts))]
    costs = [_bits(row) for row in counts]
    while len(groups) > 1:
        joined = [_bits(counts[i] + counts[i + 1]) - costs[i] - costs[i + 1] for i in range(len(groups) - 1)]
        best = min(range(len(joined)), key=joined.__getitem__)
        if joined[best] > CLASS_COST_BITS:
            break
        counts[best] += counts.pop(best + 1)
        costs[best : best + 2] = [_bits(counts[best])]
        groups[best] += groups.pop(best + 1)
    number = torch.empty(sum(map(len, groups)), dtype=torch.uint8)
    for index, group in enumerate(groups):
        number[group] = index
    return number[own.cpu()]


def code_bits(codes: Tensor) -> float:
    """Return the ideal bits of a matrix's codes, coded in classes of rows, tables included; an estimate.

    Args:
        codes: integers of any type, [rows, columns].
    """
    classes = row_classes(codes).to(codes.device)
    counts = _histograms(codes, classes.long())
    return sum(_bits(row) + CLASS_COST_BITS for row in counts)


def _histograms(codes: Tensor, classes: Tensor) -> list[NDArray[np.int64]]:
    """Counts of the codes up to COUNTED in magnitude (the ends: and beyond) for each class."""
    kinds, width = int(classes.max()) + 1, 2 * COUNTED + 1
    index = codes.clamp(-COUNTED, COUNTED).to(torch.int32).add_(COUNTED)
    index += classes.to(torch.int32)[:, None] * width
    counted = torch.bincount(index.flatten(), minlength=kinds * width).cpu().numpy()
    return list(counted.reshape(kinds, width).astype(np.int64))


def _bits(counts: NDArray[np.int64]) -> float:
    present = counts[counts > 0]
    total = present.sum()
    return float(total * np.log2(total) - (present * np.log2(present)).sum()) if total else 0.0


def _places(classes: Tensor, columns: int) -> Iterator[Tensor]:
    """Yield the rows of every block, in rising order within each class."""
    for index in range(int(classes.max()) + 1):
        rows = (classes == index).nonzero()[:, 0]
        for part in row_blocks(len(rows), columns):
            yield rows[part]


def _pack(codes: NDArray[np.int16]) -> bytes:
    largest = np.abs(codes).max(initial=0)
    best = b""
    for kind, digits in enumerate(DIGITS):
        packed = _packed(codes, kind, digits)
        if packed and (not best or len(packed) < len(best)):
            best = packed
        if largest < digits.base // 2 and len(packed) > len(best):
            break  # wider digits only cost more from here on
    return best


def _packed(codes: NDArray[np.int16], kind: int, digits: Digits) -> bytes:
    values = codes - digits.low
    outside = np.flatnonzero((values < 0) | (values >= digits.base))
    if len(outside) > MOST_ESCAPES * len(codes) and digits.base < 256:
        return b""
    padded = np.full(-(-len(codes) // digits.count) * digits.count, -digits.low, dtype=np.uint8)
    padded[: len(codes)] = values
    padded[outside] = -digits.low
    packed = padded[:: digits.count].copy()
    for place in range(1, digits.count):
        packed = packed * np.uint8(digits.base) + padded[place :: digits.count]
    frames = [_frame(packed.tobytes())]
    if len(outside):
        frames += [_frame(_gaps(outside)), _frame(codes[outside].astype("<i2").view(np.uint8)
                                                  .reshape(-1, 2).T.tobytes())]  # fmt: skip
    frames += [b""] * (3 - len(frames))
    return HEAD.pack(kind, len(outside), *map(len, frames)) + b"".join(frames)


def _frame(raw: bytes) -> bytes:
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
    """One block as it is stored; `size` is its number of codes."""

    digits: Digits
    escapes: int
    frames: list[memoryview]
    size: int

    def codes(self, device: str) -> Tensor:
        """Return the codes, float32 [size]."""
        packed = from_bytes(expand(self.frames[0], -(-self.size // self.digits.count))).to(device)
        if self.digits.count == 1:
            codes = packed.float().add_(self.digits.low)
        else:
            codes = _table(self.digits, device).index_select(0, packed.int()).flatten()[: self.size]
        if self.escapes:
            where, values = self._escaped()
            codes[where.to(device)] = values.to(device)
        return codes

    def _escaped(self) -> tuple[Tensor, Tensor]:
        gaps = np.frombuffer(expand(self.frames[1], None, self.size + self.escapes), dtype=np.uint8)
        ends = np.flatnonzero(gaps != SECOND)
        where = np.cumsum(gaps.astype(np.int64))[ends] + np.arange(len(ends))
        if len(ends) != self.escapes or (where >= self.size).any():
            raise ValueError("a block's escapes do not add up")
        planes = np.frombuffer(expand(self.frames[2], 2 * self.escapes), dtype=np.uint8).reshape(2, -1)
        values = np.ascontiguousarray(planes.T).view("<i2")[:, 0]
        return torch.from_numpy(where), torch.from_numpy(values.astype(np.float32))


def _decode(block: _Block, places: Tensor, steps: Tensor, device: str) -> tuple[Tensor, Tensor]:
    values = block.codes(device).reshape(len(places), -1).mul_(steps.to(device)[:, None])
    return places.to(device), values


def _table(digits: Digits, device: str) -> Tensor:
    """The codes of every byte, float32 [256, count]."""
    numbers = torch.arange(256, dtype=torch.int32)
    powers = [digits.base**place for place in reversed(range(digits.count))]
    planes = [numbers // power % digits.base + digits.low for power in powers]
    return torch.stack(planes, dim=1).float().to(device)


class _Reader:
    """Takes sections off a part's bytes, and refuses to run over its end."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.place = content, 0

    def take(self, size: int) -> memoryview:
        taken = self.content[self.place : self.place + size]
        if len(taken) != size:
            raise ValueError(".codes ends before its blocks do")
        self.place += size
        return taken

    def end(self) -> None:
        if self.place != len(self.content):
            raise ValueError(f"{len(self.content) - self.place} bytes lie behind the last block of .codes")
