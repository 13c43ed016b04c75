"""zstd over any codec's parts: each becomes one frame, in blocks of bytes of its own type.

Frames are expanded by libzstd itself, as the pinned binding carries it: one call without the interpreter's
lock, straight into the tensor that keeps the bytes. The binding's own call joins pieces while every other
thread waits.
"""

import ctypes
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

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
        found[suffix] = expand(parts[suffix + SUFFIX], most, exact=known).view(dtype).reshape(shape)
    if unknown := sorted(parts.keys() - {suffix + SUFFIX for suffix in expected}):
        raise ValueError(f"{unknown[0]} is no part of it")
    return found


def expand(frame: Tensor, size: int, *, exact: bool = True, pinned: bool = False) -> Tensor:
    """Decompress exactly one frame that must hold `size` bytes, or at most as many.

    Args:
        frame: uint8, on the host, contiguous.
        size: the bytes that it must hold.
        exact: False: at most `size`.
        pinned: whether a GPU is to copy the result while the host goes on.

    Raises:
        ValueError: the frame holds something else, or is not one whole frame.
    """
    plain, quick = _library()
    start, length = frame.data_ptr(), frame.numel()
    said = quick.ZSTD_getFrameContentSize(start, length)
    if said > size or (exact and said != size):
        told = "no size" if said >= 1 << 63 else str(said)
        raise ValueError(f"a zstd frame of {length} bytes: expected {size}, its head says {told}")
    room = torch.empty(said, dtype=torch.uint8, pin_memory=pinned)
    written = plain.ZSTD_decompress(room.data_ptr(), said, start, length)
    if quick.ZSTD_isError(written):
        reason = quick.ZSTD_getErrorName(written).decode()
        raise ValueError(f"a zstd frame of {length} bytes is damaged ({reason})")
    whole = quick.ZSTD_findFrameCompressedSize(start, length)
    if written != said or whole != length:
        raise ValueError(f"a zstd frame of {length} bytes: expected {said}, found {written}, and it ends "
                         f"after {whole}")
    return room


@cache
def _library() -> tuple[Any, Any]:
    """libzstd's stable calls twice: without the interpreter's lock, and with it for what takes no time.

    Raises:
        ImportError: the binding is of a build that does not show them.
    """
    path = import_module("backports.zstd._zstd").__file__
    plain, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
    if not hasattr(quick, "ZSTD_decompress"):
        raise ImportError(f"{path} does not show libzstd's calls; install the wheel that is pinned")
    place, size = ctypes.c_void_p, ctypes.c_size_t
    plain.ZSTD_decompress.argtypes, plain.ZSTD_decompress.restype = (place, size, place, size), size
    for name, takes, gives in (
        ("ZSTD_getFrameContentSize", (place, size), ctypes.c_ulonglong),
        ("ZSTD_findFrameCompressedSize", (place, size), size),
        ("ZSTD_isError", (size,), ctypes.c_uint),
        ("ZSTD_getErrorName", (size,), ctypes.c_char_p),
    ):  # fmt: skip
        call = getattr(quick, name)
        call.argtypes, call.restype = takes, gives
    return plain, quick


def to_bytes(part: Tensor) -> memoryview:
    """The bytes of a tensor, on the host."""
    return memoryview(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def from_bytes(raw: bytes) -> Tensor:
    """A uint8 tensor of its own, [bytes]."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
