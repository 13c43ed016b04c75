"""safetensors files that repeat: the same tensors and metadata give the same bytes.

The library writes metadata in the order of a hash map, which is another one in every process; so the header
is written here, as the format's description says (github.com/huggingface/safetensors); the library reads it.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

TYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
ALIGNMENT = 8


def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file: the widest types first, then by name.

    It is written beside its place and moved in: tensors that are mapped from the old file stay whole.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as stream:
        stream.write(_header(tensors, metadata))
        for name in _order(tensors):
            content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            stream.write(memoryview(content.numpy()))
    partial.replace(path)


def size(tensors: dict[str, Tensor], metadata: dict[str, str]) -> int:
    """Return the bytes of the file that `save` would write, exactly."""
    return len(_header(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors.values())


def _order(tensors: dict[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    place = 0
    for name in _order(tensors):
        end = place + tensors[name].nbytes
        fields[name] = {"dtype": TYPES[tensors[name].dtype], "shape": list(tensors[name].shape),
                        "data_offsets": [place, end]}  # fmt: skip
        place = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
    return len(padded).to_bytes(8, "little") + padded
