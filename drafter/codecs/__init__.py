"""Codecs: how a weight matrix becomes bytes and comes back, one module each.

A codec module has two functions:

    encode(weight, settings) -> parts     weight float32, [rows, columns] or [size]; parts by suffix
    decode(parts, settings) -> weight     float32, of the shape it was

`settings` is the tensor's entry in the plan that travels in the file's header: `codec`, `shape`, and what
else the codec needs. `decode(encode(w))` is the exact value that serving uses, so training through it sees
what ships.
"""

from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor

Settings = dict[str, Any]


class Codec(Protocol):
    """What every codec module offers."""

    def encode(self, weight: Tensor, settings: Settings) -> dict[str, Tensor]:
        """Turn a float32 tensor into its stored parts, by suffix."""
        ...

    def decode(self, parts: dict[str, Tensor], settings: Settings) -> Tensor:
        """Turn stored parts back into a float32 tensor."""
        ...


def codec(name: str) -> Codec:
    """Return the codec module of this name.

    Raises:
        ValueError: there is none.
    """
    if not str(name).isalnum():
        raise ValueError(f"there is no codec {name!r}")
    try:
        return cast(Codec, import_module(f"drafter.codecs.{name}"))
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no codec {name!r}") from error


def round_trip(weight: Tensor, settings: Settings) -> Tensor:
    """Return what serving will see of a weight: decode(encode(weight)), float32."""
    chosen = codec(settings["codec"])
    return chosen.decode(chosen.encode(weight, settings), settings)
