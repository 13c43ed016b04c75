"""Digits: how a block of whole numbers becomes bytes for zstd, and comes back; the entropy codec's workshop.

Small numbers lie several to a byte, as digits of some base; one beyond them is an escape: its place holds a
0, and its gap from the last one and its value stand apart (int8 if all are short, else int16: all low bytes,
then all high ones). zstd codes the bytes, and its Huffman stage does the work; matches are all but not looked
for: at low rates chance ones cost more than they save.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from backports import zstd
from numpy.typing import NDArray
from torch import Tensor

from drafter.codecs import Placed
from drafter.codecs.zstd import expand, to_bytes

HEAD = struct.Struct("<BIIII")  # digits, escapes, bytes of the three frames
SECOND = 255  # a gap byte that says: 255 more, and go on
SHORT = 127  # the largest escape that one byte holds
MOST_ESCAPES = 0.04
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


@dataclass(frozen=True)
class Digitised:
    """A block before compression, on the host: digits several to a byte, and its escapes."""

    kind: int
    packed: Tensor
    where: Tensor
    escapes: Tensor


def digitised(codes: Tensor, kind: int) -> Digitised | None:
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
    return Digitised(kind, packed.cpu(), where.cpu(), codes[where].cpu())


def coded(block: Digitised) -> bytes:
    """Return the section of a block: its head and three frames."""
    frames = [frame(to_bytes(block.packed)), b"", b""]
    if len(block.where):
        escapes = block.escapes.numpy()
        short = np.abs(escapes).max() <= SHORT
        planes = escapes.astype(np.int8) if short else escapes.astype("<i2").view(np.uint8).reshape(-1, 2).T
        frames[1:] = [frame(_gaps(block.where.numpy())), frame(planes.tobytes())]
    return HEAD.pack(block.kind, len(block.where), *map(len, frames)) + b"".join(frames)


def frame(raw: bytes | memoryview) -> bytes:
    """Compress bytes as literals."""
    return zstd.compress(raw, options=OPTIONS)


def _gaps(places: NDArray[np.int64]) -> bytes:
    """Distances less 1 as bytes; a byte SECOND adds 255 and goes on."""
    gaps = np.diff(places, prepend=-1) - 1
    more = gaps // SECOND
    written = np.full(int(more.sum()) + len(gaps), SECOND, dtype=np.uint8)
    written[np.cumsum(more + 1) - 1] = gaps % SECOND
    return written.tobytes()


@dataclass(frozen=True)
class Block:
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


def table(digits: Digits, device: str) -> Tensor:
    """Return the codes of every byte, float32 [256, count]."""
    numbers = torch.arange(256, dtype=torch.int32)
    powers = [digits.base**place for place in reversed(range(digits.count))]
    planes = [numbers // power % digits.base + digits.low for power in powers]
    return torch.stack(planes, dim=1).float().to(device)
