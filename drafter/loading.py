"""From a folder to an engine that is warm."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from drafter import logs, weights
from drafter.engine import Engine
from drafter.model import build
from drafter.settings import WEIGHTS, Settings
from drafter.trial import trusted


def open_engine(folder: Path, settings: Settings) -> Engine:
    """Load the weights onto the GPU in bfloat16, or onto the CPU in the type that serving.json names.

    Raises:
        ValueError: the weights or the token limit do not fit; the message names the file.
    """
    # With its number, as tensors there say it: the trial of the kernels is kept by it.
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, settings.dtype_cpu) if device == "cpu" else torch.bfloat16
    started = time.monotonic()
    with ThreadPoolExecutor(1) as beside:  # kernels are compiled while weights are read
        trial = beside.submit(trusted, weights.shape_of(folder / WEIGHTS), dtype, torch.device(device))
        config, tensors = weights.load(folder / WEIGHTS, device, dtype)
        trial.result()
    if settings.token_limit > config.vocab_size:
        raise ValueError(
            f"{folder}: token_limit is {settings.token_limit}, but there are {config.vocab_size} embeddings"
        )
    try:
        decoder = build(config, tensors, dtype, device)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS}: {error}") from error
    del tensors  # the engine joins matrices: no second copy of them is to stay
    logs.event(logging.INFO, "weights loaded", device=device, dtype=str(dtype).removeprefix("torch."),
               took_s=round(time.monotonic() - started, 3))
    slots = settings.slots or settings.max_batch
    return Engine(decoder, settings.context_tokens, slots=slots, token_limit=settings.token_limit,
                  draft_tokens=settings.draft_tokens)


def warm_up(engine: Engine, settings: Settings) -> None:
    """Draft in batches of every size; see Engine.warm_up."""
    started = time.monotonic()
    engine.warm_up(settings.max_batch, settings.draft_tokens)
    logs.event(logging.INFO, "warmed up", mode=engine.mode, took_s=round(time.monotonic() - started, 3))
