"""Packed weights: a safetensors file whose header holds the model's shape and each tensor's codec.

Metadata: `config` (the shape), `plan` (tensor name -> settings of its codec) and `sums` (stored name -> crc32
of every SUM_BYTES of it, in hexadecimal), so that one flipped bit is refused with the tensor's name.
"""

import json
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter import codecs, tensorfile, threads
from drafter.codecs import Decoding, Parts, Placed, Settings
from drafter.codecs.zstd import to_bytes
from drafter.config import MOST, ModelConfig
from drafter.limits import MEMORY, Fault

Plan = dict[str, Settings]
Side = Mapping[str, Parts]
Rest = Callable[[], None]
Task = Callable[[], Rest | None]

SUM_BYTES = 1 << 22
MOST_THREADS = 16
AHEAD = 4  # tasks a thread: what is expanded and not yet on a GPU
HUGE_PAGE = 1 << 21
DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
DAMAGE = (LookupError, TypeError, ArithmeticError, RuntimeError, ValueError)


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
    with threads.pool(MOST_THREADS) as pool:
        sums = dict(zip(on_host, pool.map(sums_of, on_host.values()), strict=True))
    tensorfile.save(on_host, path, metadata(config, plan, sums))


def size(config: ModelConfig, plan: Plan, parts: Parts) -> int:
    """Return the bytes of the file that `save` would write, exactly."""
    length = {name: "0" * (8 * -(-part.nbytes // SUM_BYTES)) for name, part in parts.items()}
    return tensorfile.size(parts, metadata(config, plan, length))


def metadata(config: ModelConfig, plan: Plan, sums: Mapping[str, str]) -> dict[str, str]:
    """Return what the header of a packed file says beside names, types and places."""
    return {"config": config.to_json(), "plan": json.dumps(plan, sort_keys=True, separators=(",", ":")),
            "sums": json.dumps(sums, sort_keys=True, separators=(",", ":"))}  # fmt: skip


def sums_of(part: Tensor) -> str:
    """Return the crc32 of every SUM_BYTES of a part, eight hexadecimal digits each."""
    content = to_bytes(part)
    starts = range(0, len(content), SUM_BYTES)
    return "".join(f"{zlib.crc32(content[start : start + SUM_BYTES]):08x}" for start in starts)


def sum_checks(path: Path, name: str, part: Tensor, sums: dict[str, str]) -> list[Task]:
    """Return the tasks that hold a stored part to the sums of the header, one for every SUM_BYTES.

    Raises:
        ValueError: (here, or in a task) a bit has flipped; the message names file, part and block.
    """
    expected, content = str(sums.get(name)), to_bytes(part)
    count = -(-len(content) // SUM_BYTES)

    def check(block: int, known: bool = True) -> None:
        found = zlib.crc32(content[block * SUM_BYTES : (block + 1) * SUM_BYTES])
        if not known or f"{found:08x}" != expected[8 * block : 8 * block + 8]:
            raise ValueError(f"{path}: tensor {name} is damaged: its sum is wrong in block {block} of "
                             f"{count}; copy the file again")

    if len(expected) != 8 * count:
        check(0, known=False)
    return [partial(check, block) for block in range(count)]


def load(path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Parts]:
    """Read packed weights and decode every tensor on a device, in the type in which it is to be used.

    A thread a core, MOST_THREADS at most, holds stored bytes to their sums and decodes blocks straight to
    their place; for a GPU the threads only expand, and the calling thread alone speaks to the device. Beside
    the result some tens of MB a thread are in memory.

    Raises:
        ValueError: the file is missing, damaged or does not hold what its header says; the message names the
            file and, where it can, the tensor.
        MemoryError: the host has none left.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            config, plan, sums = read_header(path, stored.metadata())
            loader = _Loader(path, stored, sums, device, dtype)
            run_all(loader.tasks(plan))
            loader.check_ends()
    except (SafetensorError, OSError) as error:
        raise ValueError(not_whole(path, error)) from error
    if loader.left:
        first = ", ".join(sorted(loader.left)[:3])
        raise ValueError(f"{path}: holds tensors that its plan does not name: {first}")
    return config, loader.tensors


def shape_of(path: Path) -> ModelConfig:
    """Read the model's shape alone, from the header.

    Raises:
        ValueError: the file is missing, or its header is not a packed drafter's; the message names it.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            return read_header(path, stored.metadata())[0]
    except (SafetensorError, OSError) as error:
        raise ValueError(not_whole(path, error)) from error


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
    except (KeyError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header is not a packed drafter's ({error})") from error


def run_all(tasks: Iterator[Task]) -> None:
    """Run tasks in threads, a bounded number ahead, and what they return in this one, in the tasks' order.

    The first error ends it.
    """
    waiting: deque[Future[Rest | None]] = deque()

    def settle() -> None:
        if rest := waiting.popleft().result():
            rest()

    with threads.pool(MOST_THREADS) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > AHEAD * threads.workers(MOST_THREADS):
                    settle()
            while waiting:
                settle()
        finally:
            for future in waiting:
                future.cancel()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a tensor to be filled; on a CPU in huge pages where the system has them.

    Filling gigabytes page by page takes longer than decoding them.
    """
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if device != "cpu" or tensor.nbytes < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or a false shape, which torch then refuses
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class _Loader:
    """Yields the tasks that check and decode every tensor of an open file."""

    def __init__(self, path: Path, stored: Any, sums: dict[str, str], device: str,
                 dtype: torch.dtype) -> None:
        self.path, self.stored, self.sums, self.device, self.dtype = path, stored, sums, device, dtype
        self.left = set(stored.keys())
        self.tensors: Parts = {}
        self.ends: list[tuple[str, Tensor]] = []  # of every block on a GPU: its least and largest value

    def tasks(self, plan: Plan) -> Iterator[Task]:
        for name, settings in plan.items():
            parts = parts_of(self.stored, name, self.left)
            self.left.difference_update(name + suffix for suffix in parts)
            for suffix, part in parts.items():
                yield from sum_checks(self.path, name + suffix, part, self.sums)
            yield from self._decodings(name, settings, parts)

    def _decodings(self, name: str, settings: Settings, parts: Parts) -> Iterator[Task]:
        with self._telling(name, settings):
            shape = settings["shape"]
            if not isinstance(shape, list) or not all(type(n) is int and 0 < n < MOST for n in shape):
                raise ValueError(f"shape {shape!r} is no list of positive numbers below {MOST}")
            jobs = codecs.blocks(parts, settings, self.device)
            tensor: Tensor | None = None
            for job in jobs:  # the first job has checked the parts, so a false shape takes no memory
                if tensor is None:
                    tensor = empty(tuple(shape), self.dtype, self.device)
                    self.tensors[name] = tensor
                yield partial(self._decode, name, settings, tensor, job)

    def _decode(self, name: str, settings: Settings, tensor: Tensor, job: Decoding) -> Rest | None:
        with self._telling(name, settings):
            rest = job()
        if tensor.is_cuda:
            return partial(self._place, name, settings, tensor, rest)
        self._place(name, settings, tensor, rest)
        return None

    def _place(self, name: str, settings: Settings, tensor: Tensor, rest: Callable[[], Placed]) -> None:
        with self._telling(name, settings):
            rows, values = rest()
            tensor[rows] = values.to(self.dtype)
        ends = torch.stack(values.aminmax())
        if tensor.is_cuda:
            self.ends.append((name, ends))
        elif not bool(torch.isfinite(ends).all()):
            bad = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0])
            row = rows.start + bad if isinstance(rows, slice) else int(rows[bad])
            raise ValueError(f"{self.path}: tensor {name}, row {row}: not a finite number")

    def check_ends(self) -> None:
        """Refuse what is not finite on a GPU: asked once, since each question makes the host wait for it."""
        if not self.ends:
            return
        finite = torch.isfinite(torch.stack([ends for _, ends in self.ends])).all(1).tolist()
        for (name, _), good in zip(self.ends, finite, strict=True):
            if not good:
                try:
                    check_finite(name, self.tensors[name])
                except ValueError as error:
                    raise ValueError(f"{self.path}: {error}") from error

    @contextmanager
    def _telling(self, name: str, settings: Settings) -> Iterator[None]:
        """Name the tensor that is damaged; a fault of the device, or of memory, says nothing of the file."""
        try:
            yield
        except DEVICE:
            raise
        except DAMAGE as error:
            if str(error).startswith(str(self.path)):
                raise
            if Fault.of(error).kind == MEMORY:
                raise MemoryError(f"tensor {name}: {error}") from error
            told = f"tensor {name} does not decode as {settings['codec']}: {error}"
            raise ValueError(f"{self.path}: {told}") from error
