"""zstd over any codec's parts: each becomes one frame, in blocks of bytes of its own type."""

from math import prod

import torch
from backports import zstd
from torch import Tensor

from drafter.codecs import Layout, Parts, Settings

SUFFIX = ".zst"
ROOM = 1 << 16  # what a part of a length not known beforehand may be over 8 bytes a weight


def compress(parts: Parts, level: int) -> Parts:
    """Compress every part; the suffixes say so."""
    return {
        suffix + SUFFIX: from_bytes(zstd.compress(to_bytes(part), level)) for suffix, part in parts.items()
    }


def decompress(parts: Parts, expected: Layout, settings: Settings) -> Parts:
    """Return the parts as the codec made them.

    Raises:
        ValueError: a frame is cut, holds more or less than the layout says, or has something behind it.
    """
    found = {}
    for suffix, (shape, dtype) in expected.items():
        known = -1 not in shape
        most = prod(shape) * dtype.itemsize if known else 8 * prod(settings["shape"]) + ROOM
        raw = expand(memoryview(to_bytes(parts[suffix + SUFFIX])), most if known else None, most)
        found[suffix] = from_bytes(raw).view(dtype).reshape(shape)
    if unknown := sorted(parts.keys() - {suffix + SUFFIX for suffix in expected}):
        raise ValueError(f"{unknown[0]} is no part of it")
    return found


def expand(frame: memoryview, size: int | None, most: int | None = None) -> bytes:
    """Decompress exactly one frame that must hold `size` bytes (None: at most `most`).

    Raises:
        ValueError: it does not.
    """
    most = size if size is not None else most or 0
    reader = zstd.ZstdDecompressor()
    try:
        raw = reader.decompress(frame, max_length=most + 1)
        if not reader.eof and len(raw) <= most:  # an empty frame ends only when it is asked again
            raw += reader.decompress(b"", max_length=1)
    except (zstd.ZstdError, EOFError) as error:
        raise ValueError(f"a zstd frame is damaged ({error})") from error
    if not reader.eof or reader.unused_data or (size is not None and len(raw) != size):
        state = "and goes on" if not reader.eof else f"and {len(reader.unused_data)} bytes lie behind it"
        raise ValueError(f"a zstd frame of {len(frame)} bytes: expected {most}, found {len(raw)} {state}")
    return raw


def to_bytes(part: Tensor) -> memoryview:
    """The bytes of a tensor, on the host."""
    return memoryview(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def from_bytes(raw: bytes) -> Tensor:
    """A uint8 tensor of its own, [bytes]."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
