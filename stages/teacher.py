"""teacher: the target writes its greedy continuations, with its top-k logprobs, in shards."""

import time
from pathlib import Path
from typing import Any, Protocol

from drafter.engine import Engine, Generated, Generation
from stages.errors import UserError
from stages.files import link_or_copy, read_jsonl, write_jsonl
from stages.job import Job
from stages.models.target import load_target
from stages.training.shards import read_tally, write_shard
from stages.training.tally import Tally, added, count, report

SECTIONS = ("target", "teacher")
TAKES = ("fetch/{target.source}/*", "data/*.jsonl")
FILES = ()
LIBRARIES = ("torch", "safetensors", "gguf")
EVALUATION_SETS = ("dev", "examples", "heldout")

PromptRow = dict[str, Any]


class Writer(Protocol):
    """What continues the prompts of a shard: the engine in this process, or something of its like."""

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Return the greedy continuation of each prompt, with its top-k; an empty one is left out."""


def run(job: Job) -> dict[str, object]:
    """Leave one shard for each `shard_rows` training prompts, and the evaluation sets with continuations.

    A shard is the unit of batching and of resume: prompts are sorted by length and cut into shards in that
    fixed order, and each shard is one batch, so a resumed run gives the same bytes.
    """
    settings = job.config.teacher
    sets = {name: list(read_jsonl(job.inputs["data"] / f"{name}.jsonl")) for name in EVALUATION_SETS}
    rows = list(read_jsonl(job.inputs["data"] / "train.jsonl"))
    if not rows:
        raise UserError("the data stage left no training prompt; look at its counts in data_manifest.json")
    engine = open_engine(job)
    tasks = [(f"{name}.jsonl", evaluation) for name, evaluation in sets.items()]
    tasks += [(f"train-{i:05d}.safetensors", shard) for i, shard in enumerate(cut(rows, settings.shard_rows))]
    job.say(f"{len(rows)} prompts for training, {sum(map(len, sets.values()))} for evaluation")
    bar = job.progress([row for _, task in tasks for row in task], unit="prompt")
    tallies: list[Tally] = []
    tokens, seconds = 0, 0.0  # of this run alone: what an earlier one left costs nothing now
    for name, task in tasks:
        path = job.work / name
        if name.endswith(".jsonl"):
            _evaluation(job, engine, path, task)
        else:
            found, took_s = _shard(job, engine, path, task)
            tallies.append(found)
            tokens, seconds = tokens + count(found) * (took_s > 0), seconds + took_s
        for _ in task:
            next(bar)
    next(bar, None)  # past the last row the bar closes
    for name, _ in tasks:  # the work folder keeps its own until the record is written
        link_or_copy(job.work / name, job.out / name)
    if seconds:  # no metric: a run that was killed and resumed has the same metrics as one that was not
        job.say(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} a second")
    return report(added(tallies)) | {"shards": len(tallies)}


def open_engine(job: Job) -> Writer:
    """Return what writes the continuations.

    Raises:
        UserError: the target's files are missing, damaged or of another shape.
    """
    settings, target = job.config.teacher, job.config.target
    decoder = load_target(job.inputs["fetch"] / target.source, target.format, settings.dtype, job.device)
    return Engine(decoder, settings.context_tokens, token_limit=target.token_count)


def cut(rows: list[PromptRow], size: int) -> list[list[PromptRow]]:
    """Cut rows into shards of prompts of like length, so that a batch pads little."""
    ordered = sorted(rows, key=lambda row: (len(row["prompt"]), row["id"]))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def _shard(job: Job, engine: Writer, path: Path, rows: list[PromptRow]) -> tuple[Tally, float]:
    """Make one shard unless an earlier, killed run has: a shard gets its name when it is whole.

    Returns:
        What its rows are like, and the seconds of generating them; 0 where it was there.
    """
    found, seconds = read_tally(path), 0.0
    if found is None:
        prompts, partial = [row["prompt"] for row in rows], path.with_suffix(".partial")
        began = time.monotonic()
        generated = engine.generate(prompts, _generation(job))
        seconds = time.monotonic() - began
        write_shard(partial, prompts, generated, [row["category"] for row in rows])
        partial.rename(path)
        found = read_tally(path) or {}
        job.event("shard", file=path.name, rows=len(rows), tokens=count(found), seconds=round(seconds, 3))
    return found, seconds


def _evaluation(job: Job, engine: Writer, path: Path, rows: list[PromptRow]) -> None:
    if path.is_file():
        return
    done: list[PromptRow] = []
    for shard in cut(rows, job.config.teacher.shard_rows):
        generated = engine.generate([row["prompt"] for row in shard], _generation(job))
        pairs = zip(shard, generated, strict=True)
        done += [row | {"continuation": one.tokens} for row, one in pairs if one.tokens]
    if rows and not done:
        raise UserError(f"{path.name}: no conversation has a continuation")
    done.sort(key=lambda row: str(row["id"]))
    write_jsonl(path, done)


def _generation(job: Job) -> Generation:
    settings = job.config.teacher
    return Generation(
        max_tokens=settings.max_tokens,
        stop_ids=job.config.target.stop_ids,
        top_k=settings.top_k,
        stop_on_repeat=settings.stop_on_repeat,
    )
