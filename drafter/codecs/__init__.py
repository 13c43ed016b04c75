"""Codecs: how a weight matrix becomes bytes and comes back, one module each.

A codec module has three functions:

    layout(settings) -> shape and type of each stored part, by suffix (-1: as long as the coding made it)
    encode(weight, settings, side) -> parts, by suffix; weight float32, [rows, columns] or [size]
    blocks(parts, settings, device) -> jobs, each of which decodes some rows to float32 on the device

A job has two halves: called in any thread, it does the host's share (expanding what is compressed) and
returns what does the rest on the device. A GPU is so fed by one thread, while the others only expand.

`settings` is the tensor's entry in the plan that travels in the file's header: `codec`, `shape`, and what
else the codec needs. `side` holds tensors that were planned beside the weight, such as the entropy codec's
steps. Over any codec lie, where the settings say so, a low-rank correction (`rank`) and zstd (`zstd`, its
level). Decoding is by blocks alone, so that what serving streams and what training sees is one code.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Protocol, cast

import torch
from torch import Tensor

Settings = dict[str, Any]
Parts = dict[str, Tensor]
Rows = slice | Tensor
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
Placed = tuple[Rows, Tensor]
Decoding = Callable[[], Callable[[], Placed]]

BLOCK_WEIGHTS = 1 << 20  # decoded at a time: a few MB in flight for each thread


class Codec(Protocol):
    """What every codec module offers."""

    def layout(self, settings: Settings) -> Layout:
        """Say which parts a tensor of these settings has."""
        ...

    def encode(self, weight: Tensor, settings: Settings, side: Parts) -> Parts:
        """Turn a float32 tensor into its stored parts, by suffix."""
        ...

    def blocks(self, parts: Parts, settings: Settings, device: str) -> Iterator[Decoding]:
        """Yield jobs, whose second half returns some rows' places and their float32 values on the device."""
        ...


def codec(name: str) -> Codec:
    """Return the codec module of this name.

    Raises:
        ValueError: there is none.
    """
    known = str(name).isalnum() and name not in ("digits", "lowrank", "zstd", "rows")
    try:
        if known:
            return cast(Codec, import_module(f"drafter.codecs.{name}"))
    except ModuleNotFoundError as error:
        if error.name != f"drafter.codecs.{name}":
            raise
    raise ValueError(f"there is no codec {name!r}")


def encode(weight: Tensor, settings: Settings, side: Parts | None = None) -> Parts:
    """Encode one float32 tensor, with its correction and zstd where the settings ask for them.

    Raises:
        ValueError: the tensor does not suit its codec.
    """
    from drafter.codecs import lowrank, zstd  # noqa: PLC0415 (they use this module)

    side = side or {}
    corrected = lowrank.remainder(weight, side) if settings.get("rank") else weight
    parts = codec(settings["codec"]).encode(corrected, settings, side)
    if settings.get("rank"):
        parts |= lowrank.parts(settings, side)
    return zstd.compress(parts, settings["zstd"]) if settings.get("zstd") else parts


def layout(settings: Settings) -> Layout:
    """Return the layout of a tensor's parts before zstd, its correction's included."""
    from drafter.codecs import lowrank  # noqa: PLC0415

    found = codec(settings["codec"]).layout(settings)
    return found | lowrank.layout(settings) if settings.get("rank") else found


def blocks(parts: Parts, settings: Settings, device: str = "cpu") -> Iterator[Decoding]:
    """Yield the jobs that decode a tensor; each may run in a thread of its own.

    Raises:
        ValueError: a part is missing, or has not the type or shape that the settings ask for.
    """
    from drafter.codecs import lowrank, zstd  # noqa: PLC0415

    expected = layout(settings)
    if settings.get("zstd"):
        parts = zstd.decompress(parts, expected, settings)
    _check(parts, expected)
    jobs = codec(settings["codec"]).blocks(parts, settings, device)
    return lowrank.corrected(jobs, parts, device) if settings.get("rank") else jobs


def decode(parts: Parts, settings: Settings, device: str = "cpu") -> Tensor:
    """Return a whole tensor, float32 of the shape it was, on a device.

    Raises:
        ValueError: see `blocks`.
    """
    tensor = torch.empty(tuple(settings["shape"]), dtype=torch.float32, device=device)
    for job in blocks(parts, settings, device):
        rows, values = job()()
        tensor[rows] = values
    return tensor


def round_trip(weight: Tensor, settings: Settings, side: Parts | None = None) -> Tensor:
    """Return what serving will see of a weight: decode(encode(weight)), float32, on the weight's device."""
    shortcut = getattr(codec(settings["codec"]), "round_trip", None)
    if shortcut and not settings.get("rank"):
        return cast(Tensor, shortcut(weight, settings))
    return decode(encode(weight, settings, side), settings, str(weight.device))


def size(settings: Settings) -> int | None:
    """Return the exact bytes of a tensor's parts before it is encoded; None where its values decide."""
    shapes = layout(settings)
    if settings.get("zstd") or any(-1 in shape for shape, _ in shapes.values()):
        return None
    return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut a matrix into runs of rows of at most BLOCK_WEIGHTS weights, one row at least."""
    step = max(1, BLOCK_WEIGHTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def on_device(decode: Callable[..., Placed], *arguments: object) -> Decoding:
    """Return a job without a share for the host."""
    return partial(partial, decode, *arguments)


def _check(parts: Parts, expected: Layout) -> None:
    # Left to itself, a part of another shape might be broadcast to wrong weights without a word.
    for suffix, (shape, dtype) in expected.items():
        part = parts[suffix]
        same = len(shape) == part.ndim and all(n in (-1, m) for n, m in zip(shape, part.shape, strict=True))
        if not same or part.dtype != dtype:
            found = f"{list(part.shape)} of {part.dtype}"
            raise ValueError(f"{suffix}: expected shape {list(shape)} of {dtype}, found {found}")
    if unknown := sorted(parts.keys() - expected.keys()):
        raise ValueError(f"{unknown[0]} is no part of it")
