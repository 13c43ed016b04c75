"""safetensors files that repeat: the same tensors and metadata give the same bytes."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with its metadata in the order of their names.

    The library writes them in the order of a hash map, which is another one in every process.

    Raises:
        ValueError: the header does not fit its place when it is put in order.
    """
    save_file(tensors, path, metadata=metadata)
    with path.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) > size:
            raise ValueError(f"{path}: a header of {size} bytes became {len(ordered)} bytes in order")
        stream.seek(8)
        stream.write(ordered.ljust(size))
