"""Checkpoints: the whole state of a training run, written beside the training, whole or not at all."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.errors import UserError


class Checkpoints:
    """The checkpoints of one run, in a folder of its own; only the newest is kept.

    Args:
        folder: where they are written.
        every_s: seconds between two; 0 writes one after each step.
    """

    def __init__(self, folder: Path, every_s: float) -> None:
        self.folder, self.every_s = folder, every_s
        self.last = time.monotonic()
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def due(self) -> bool:
        """Say whether it is time for the next; never while one is still being written."""
        busy = self.writing is not None and not self.writing.done()
        return not busy and time.monotonic() - self.last >= self.every_s

    def save(self, step: int, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
        """Copy the state to host memory, and write it in a thread.

        Raises:
            UserError: the one before could not be written.
        """
        self.wait()
        on_host = {name: _copy(tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self.last = time.monotonic()
        self.writing = self.pool.submit(self._write, step, on_host, header)

    def wait(self) -> None:
        """Wait until what is being written is there.

        Raises:
            UserError: it could not be written.
        """
        writing, self.writing = self.writing, None
        try:
            if writing:
                writing.result()
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.folder}: a checkpoint could not be written ({error}); make room, or name "
                            "another checkpoints.folder") from error

    def newest(self, say: Callable[[str], None]) -> tuple[dict[str, str], dict[str, Tensor]] | None:
        """Return header and tensors of the newest whole checkpoint; what is not whole is removed."""
        for path in reversed(self._paths()):
            try:
                with safe_open(path, framework="pt") as stored:
                    header = stored.metadata()
                return header, load_file(path)
            except (SafetensorError, OSError):
                say(f"{path.name} is not whole, and removed")
                path.unlink()
        return None

    def _write(self, step: int, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
        """Write a checkpoint, then remove those before it; a kill in between leaves a whole one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"checkpoint-{step:08d}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata=header)
        with partial.open("rb") as stream:  # a machine that is taken away takes what the disk has not got
            os.fsync(stream.fileno())
        older = self._paths()
        partial.rename(path)
        for old in older:
            if old != path:
                old.unlink()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("checkpoint-*.safetensors"))


def _copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
