"""Packed weights: a safetensors file whose header holds the model's shape and each tensor's codec.

Metadata: `config` (the shape), `plan` (tensor name -> settings of its codec) and `sums` (stored name -> crc32
of every SUM_BYTES of it, in hexadecimal), so that one flipped bit is refused with the tensor's name.
"""

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter import codecs, tensorfile
from drafter.codecs import Decoding, Parts, Settings
from drafter.codecs.zstd import to_bytes
from drafter.config import ModelConfig

Plan = dict[str, Settings]
Side = Mapping[str, Parts]
Task = Callable[[], None]

SUM_BYTES = 1 << 22
DAMAGE = (KeyError, TypeError, ArithmeticError, RuntimeError, ValueError)


def encode(tensors: Mapping[str, Tensor], plan: Plan, side: Side | None = None) -> Parts:
    """Encode named floating tensors by a plan; the parts' names are the tensor's plus the codec's suffix.

    Args:
        tensors: by transformers' names; read one after the other, so they may be made as they are asked for.
        plan: the settings of each.
        side: what was planned beside the weights, such as the entropy codec's steps.

    Raises:
        ValueError: a value is not finite in bfloat16, or a tensor does not suit its codec; the message names
            the tensor.
    """
    parts: Parts = {}
    for name in sorted(tensors):
        parts |= encode_one(name, tensors[name], plan[name], (side or {}).get(name))
    return parts


def encode_one(name: str, tensor: Tensor, settings: Settings, side: Parts | None = None) -> Parts:
    """Encode one tensor, as `encode` does; the parts are on the host."""
    check_finite(name, tensor.to(torch.bfloat16))  # what overflows there would load as infinite
    try:
        encoded = codecs.encode(tensor.float(), settings, side)
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from error
    return {name + suffix: part.detach().cpu().contiguous() for suffix, part in encoded.items()}


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds NaN or infinity.

    Raises:
        ValueError: it does; the message names the tensor and the first such row.
    """
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        row = int((~finite).reshape(tensor.shape[0], -1).any(-1).nonzero()[0])
        raise ValueError(f"tensor {name}, row {row}: not a finite number")


def save(path: Path, config: ModelConfig, plan: Plan, parts: Parts) -> None:
    """Write packed weights; the same input gives the same bytes."""
    on_host = {name: part.detach().cpu().contiguous() for name, part in sorted(parts.items())}
    tensorfile.save(on_host, path, metadata(config, plan, on_host))


def size(config: ModelConfig, plan: Plan, parts: Parts) -> int:
    """Return the bytes of the file that `save` would write, exactly."""
    return tensorfile.size(parts, metadata(config, plan, parts))


def metadata(config: ModelConfig, plan: Plan, parts: Parts) -> dict[str, str]:
    """Return what the header of a packed file says beside names, types and places."""
    sums = {name: sums_of(part) for name, part in parts.items()}
    return {"config": config.to_json(), "plan": json.dumps(plan, sort_keys=True, separators=(",", ":")),
            "sums": json.dumps(sums, sort_keys=True, separators=(",", ":"))}  # fmt: skip


def sums_of(part: Tensor) -> str:
    """Return the crc32 of every SUM_BYTES of a part, eight hexadecimal digits each."""
    content = to_bytes(part)
    starts = range(0, len(content), SUM_BYTES)
    return "".join(f"{zlib.crc32(content[start : start + SUM_BYTES]):08x}" for start in starts)


def check_sums(path: Path, name: str, part: Tensor, sums: dict[str, str]) -> None:
    """Hold a stored part to the sums of the header.

    Raises:
        ValueError: a bit has flipped; the message names file, part and block.
    """
    expected, found = sums.get(name), sums_of(part)
    if found != expected:
        pairs = zip(range(0, len(found), 8), range(8, len(found) + 8, 8), strict=True)
        wrong = [start // 8 for start, end in pairs if (expected or "")[start:end] != found[start:end]]
        raise ValueError(f"{path}: tensor {name} is damaged: its sum is wrong in block "
                         f"{wrong[0] if wrong else 0} of {len(found) // 8}; copy the file again")


def load(path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Parts]:
    """Read packed weights and decode every tensor on a device, in the type in which it is to be used.

    Blocks are decoded in as many threads as there are cores and written straight to their place: beside the
    result a few MB a thread are in memory.

    Raises:
        ValueError: the file is missing, damaged or does not hold what its header says; the message names the
            file and, where it can, the tensor.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            config, plan, sums = read_header(path, stored.metadata())
            loader = _Loader(path, stored, sums, device, dtype)
            run_all(loader.tasks(plan))
    except (SafetensorError, OSError) as error:
        raise ValueError(not_whole(path, error)) from error
    if loader.left:
        first = ", ".join(sorted(loader.left)[:3])
        raise ValueError(f"{path}: holds tensors that its plan does not name: {first}")
    return config, loader.tensors


def parts_of(stored: Any, name: str, names: set[str]) -> Parts:
    """Return a tensor's parts by suffix, from an open safetensors file with these names."""
    own = [key for key in names if key == name or key.startswith(name + ".")]
    return {key.removeprefix(name): stored.get_tensor(key) for key in own}


def not_whole(path: Path, error: Exception) -> str:
    """Return the sentence for a safetensors file that is missing, cut, padded or something else."""
    found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
    return f"{path}: {found}, not a whole safetensors file ({error})"


def read_header(path: Path, fields: dict[str, str] | None) -> tuple[ModelConfig, Plan, dict[str, str]]:
    """Parse a packed file's header: shape, plan, sums.

    Raises:
        ValueError: it has none, or not of this format.
    """
    try:
        header = fields or {}
        plan: Any = json.loads(header["plan"])
        if not all({"codec", "shape"} <= entry.keys() for entry in plan.values()):
            raise ValueError("an entry of the plan lacks codec or shape")
        sums: Any = json.loads(header["sums"])
        if not isinstance(sums, dict):
            raise ValueError("its sums are no table")
        return ModelConfig.from_json(header["config"]), plan, sums
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: its header is not a packed drafter's ({error})") from error


def run_all(tasks: Iterator[Task]) -> None:
    """Run tasks in threads, a bounded number ahead; the first error ends it."""
    workers = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    waiting: deque[Future[None]] = deque()
    try:
        # A thread's own operations must not be spread over all cores once more.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > 2 * workers:
                    waiting.popleft().result()
            for future in waiting:
                future.result()
    finally:
        torch.set_num_threads(threads)  # threads yet to come take the number that was set last


class _Loader:
    """Yields the tasks that check and decode every tensor of an open file."""

    def __init__(self, path: Path, stored: Any, sums: dict[str, str], device: str,
                 dtype: torch.dtype) -> None:
        self.path, self.stored, self.sums, self.device, self.dtype = path, stored, sums, device, dtype
        self.left = set(stored.keys())
        self.tensors: Parts = {}

    def tasks(self, plan: Plan) -> Iterator[Task]:
        for name, settings in plan.items():
            parts = parts_of(self.stored, name, self.left)
            self.left.difference_update(name + suffix for suffix in parts)
            for suffix, part in parts.items():
                yield partial(check_sums, self.path, name + suffix, part, self.sums)
            yield from self._decodings(name, settings, parts)

    def _decodings(self, name: str, settings: Settings, parts: Parts) -> Iterator[Task]:
        try:
            shape = settings["shape"]
            if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
                raise ValueError(f"shape {shape!r} is no list of positive numbers")
            jobs = codecs.blocks(parts, settings, self.device)
            tensor: Tensor | None = None
            for job in jobs:  # the first job has checked the parts, so a false shape takes no memory
                if tensor is None:
                    tensor = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
                    self.tensors[name] = tensor
                yield partial(self._decode, name, settings, tensor, job)
        except DAMAGE as error:
            raise self._undecodable(name, settings, error) from error

    def _decode(self, name: str, settings: Settings, tensor: Tensor, job: Decoding) -> None:
        try:
            rows, values = job()
            tensor[rows] = values.to(self.dtype)
        except DAMAGE as error:
            raise self._undecodable(name, settings, error) from error
        low, high = values.aminmax()
        if not bool(torch.isfinite(high - low)):
            bad = (~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0]
            row = rows.start + int(bad) if isinstance(rows, slice) else int(rows[bad])
            raise ValueError(f"{self.path}: tensor {name}, row {row}: not a finite number")

    def _undecodable(self, name: str, settings: Settings, error: Exception) -> ValueError:
        told = str(error)
        if told.startswith(str(self.path)):
            return ValueError(told)
        kind = settings["codec"]
        return ValueError(f"{self.path}: tensor {name} does not decode as {kind}: {error}")
