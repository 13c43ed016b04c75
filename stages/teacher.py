"""teacher: the target writes its greedy continuations, with its top-k logprobs, in shards."""

import importlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from drafter.engine import Generation
from stages import pace
from stages.errors import UserError
from stages.fidelity import GATE, agreement, check_fidelity, file_of, read_fidelity, told
from stages.files import canonical_json, link_or_copy, read_json, write_json, write_jsonl
from stages.job import Job
from stages.prompts import Prompts, read_prompts
from stages.ranks import VARIABLE, Ranks, claimed, ranks_asked
from stages.training.shards import read_origin, read_tally, write_shard
from stages.training.tally import added, report
from stages.writers import Writer

SECTIONS = ("target", "teacher")
TAKES = ("fetch/{target.source}/*", "data/*.jsonl")
FILES = ()
LIBRARIES = ("torch", "safetensors", "gguf")
PLUGINS = (("teacher.engine", "stages.writers"),)
REACHES = "servers"
EVALUATION_SETS = ("dev", "examples", "heldout")
LOOK_S = 1.0  # between two looks at what ranks have finished

Write = Callable[[Job, Writer, Path, Prompts], None]


@dataclass(frozen=True)
class Task:
    """One file to be written.

    Attributes:
        name: of the file.
        kind: the fidelity on an evaluation set, the set itself, or a shard of the training prompts.
        rows: its prompts.
    """

    name: str
    kind: Literal["fidelity", "set", "shard"]
    rows: Prompts


def run(job: Job) -> dict[str, object]:
    """Leave one shard for each `shard_rows` training prompts, and the evaluation sets with continuations.

    A shard is the unit of batching, of resume and of what a rank takes: prompts are sorted by length and cut
    into shards in that fixed order, and each shard is one batch, so a resumed run gives the same bytes, and
    so do many ranks. Continuations that evaluation conversations come with are reproduced first, and stand.
    The record tells the pace of each run that had a part in it: nothing else of the record depends on them.

    Raises:
        UserError: there is no prompt to train on, or too few of those continuations are reproduced.
    """
    tasks, count = tasks_of(job), ranks_asked(job)
    prompts: Counter[str] = Counter()
    for task in tasks:
        prompts[task.kind] += len(task.rows)
    job.say(f"{prompts['shard']} prompts for training, {prompts['set']} for evaluation; {_hands(job, count)}")
    if job.config.teacher.min_fidelity and file_of(job.work, GATE).name not in {task.name for task in tasks}:
        job.say(f"no {GATE} conversation comes with a continuation: teacher.min_fidelity stops nothing")
    missing, turn = [task for task in tasks if not _is_finished(job, task.name)], pace.next_run(job.work)
    write = _written if count == 1 else partial(_side_by_side, count=count)
    finished = write(job, missing, turn) if missing else iter(())
    rows = (number for task in finished for number in range(len(task.rows)))
    done = prompts.total() - sum(len(task.rows) for task in missing)
    for _ in job.progress(rows, prompts.total(), unit="prompt", start=done):
        pass
    found = read_fidelity(job.work, EVALUATION_SETS)
    outputs = [task.name for task in tasks if task.kind != "fidelity"]
    for name in outputs:  # the work folder keeps its own until the record is written
        link_or_copy(job.work / name, job.out / name)
    runs = pace.paces(job.work)
    if runs:
        job.say(f"run {len(runs)}: {pace.told(runs[-1])}")
    tallies = [read_tally(job.work / task.name) or {} for task in tasks if task.kind == "shard"]
    told_of = {"fidelity": found} if found else {}
    return report(added(tallies)) | _origins(job) | told_of | {"shards": len(tallies), "runs": runs}


def tasks_of(job: Job) -> list[Task]:
    """Return the files to be written, in order: fidelities, evaluation sets, shards.

    Raises:
        UserError: there is no prompt to train on.
    """
    paths = {name: job.inputs["data"] / f"{name}.jsonl" for name in (*EVALUATION_SETS, "train")}
    rows = read_prompts(paths.pop("train"))
    if not rows:
        raise UserError("the data stage left no training prompt; look at its counts in data_manifest.json")
    shards = rows.cut(job.config.teacher.shard_rows)
    sets = {name: read_prompts(path) for name, path in paths.items()}
    given = {name: read_prompts(path, lambda row: bool(row.get("continuation")))
             for name, path in paths.items()}
    return [
        *(Task(file_of(job.work, name).name, "fidelity", some) for name, some in given.items() if some),
        *(Task(f"{name}.jsonl", "set", some) for name, some in sets.items()),
        *(Task(f"train-{index:05d}.safetensors", "shard", shard) for index, shard in enumerate(shards)),
    ]


def _hands(job: Job, count: int) -> str:
    """Say how many ranks there are, and whether there could be more."""
    here = torch.cuda.device_count() if job.device == "cuda" and not job.reach else 1
    more = f"; {here} GPUs can be used here, and {VARIABLE}={here} uses all" if here > count else ""
    return f"{count} rank{'s' * (count > 1)}{more}"


def _side_by_side(job: Job, missing: list[Task], turn: int, count: int) -> Iterator[Task]:
    """Have ranks do what is missing, and yield each task when it is finished.

    Raises:
        Exception: of a rank that died, where none was left to do its part.
    """
    with Ranks(job, count, partial(_rank, tasks=missing, turn=turn)) as ranks:
        alive = True
        while alive:
            alive = ranks.alive(LOOK_S)
            names = {task.name for task in missing if _is_finished(job, task.name)}
            yield from (task for task in missing if task.name in names)
            missing = [task for task in missing if task.name not in names]
    if missing:
        raise next(iter(ranks.faults.values()))


def _rank(job: Job, tasks: list[Task], turn: int) -> int:
    """Do one rank's part; return how many tasks fell to it."""
    return sum(1 for _ in _written(job, tasks, turn))


def _written(job: Job, tasks: list[Task], turn: int) -> Iterator[Task]:
    """Do the tasks that fall to this process, and yield each when it is finished."""
    engine = open_engine(job)
    write: dict[str, Write] = {"fidelity": _fidelity, "set": _evaluation, "shard": partial(_shard, turn=turn)}
    for kinds in (("fidelity",), ("set", "shard")):
        named = {task.name: task for task in tasks if task.kind in kinds}
        for name in claimed(job.work / "claims", list(named), partial(_is_finished, job)):
            task = named[name]
            write[task.kind](job, engine, job.work / name, task.rows)
            yield task
        check_fidelity(job.work, job.config.teacher.min_fidelity)


def _is_finished(job: Job, name: str) -> bool:
    """Say whether this or an earlier, killed run has written a file whole."""
    path = job.work / name
    return path.is_file() and (path.suffix != ".safetensors" or read_tally(path) is not None)


def open_engine(job: Job) -> Writer:
    """Return what writes the continuations.

    Raises:
        UserError: the target's files are missing, damaged or of another shape.
    """
    module = importlib.import_module(f"stages.writers.{job.config.teacher.engine}")
    return cast(Writer, module.open_writer(job))


def _origins(job: Job) -> dict[str, object]:
    """Return what the record says of a writer whose text cannot be written again from the record alone."""
    told_of = [read_origin(path) for path in job.out.glob("train-*.safetensors")]
    told_of += [read_json(path) for path in job.work.glob("origin-*.json")]
    found = {canonical_json(one): one for origin in told_of for one in origin}
    return {"rederivable": False, "servers": [found[text] for text in sorted(found)]} if found else {}


def _shard(job: Job, engine: Writer, path: Path, rows: Prompts, turn: int) -> None:
    """Make one shard: it gets its name when it is whole."""
    read = [(row["prompt"], row["category"]) for row in rows]
    prompts, categories = [prompt for prompt, _ in read], [category for _, category in read]
    unfinished = path.with_suffix(".partial")
    began = time.monotonic()
    generated = engine.generate(prompts, _generation(job))
    seconds, tokens = time.monotonic() - began, sum(len(one.tokens) for one in generated)
    write_shard(unfinished, prompts, generated, categories, engine.origin())
    pace.note(job.work, turn, path.name, tokens, seconds)
    unfinished.rename(path)
    job.event("shard", file=path.name, rows=len(rows), tokens=tokens, seconds=round(seconds, 3))


def _fidelity(job: Job, engine: Writer, path: Path, rows: Prompts) -> None:
    """Write the continuations of rows that have one anew, and how much of them that reproduces."""
    written, _ = _continued(job, engine, rows)
    given, again = zip(*((row["continuation"], written[row["id"]].tolist()) for row in rows), strict=True)
    found = agreement(given, again, job.config.teacher.max_tokens)
    write_json(path, found)
    job.say(told(path.stem.removeprefix("fidelity-"), found))


def _evaluation(job: Job, engine: Writer, path: Path, rows: Prompts) -> None:
    """Write a set: continuations that came with it stand, the others are the teacher's."""
    open_ended = read_prompts(rows.path, lambda row: not row.get("continuation"))
    written, origin = _continued(job, engine, open_ended)
    if len(rows) == len(open_ended) and rows and not any(written.values()):
        raise UserError(f"{path.name}: no conversation has a continuation")
    if origin:
        write_json(job.work / f"origin-{path.stem}.json", origin)
    write_jsonl(path, (row | {"continuation": row.get("continuation") or written[row["id"]].tolist()}
                       for row in rows.by_id() if row.get("continuation") or written[row["id"]]))


def _continued(job: Job, engine: Writer,
               rows: Prompts) -> tuple[dict[str, "array[int]"], list[dict[str, Any]]]:
    """Return the teacher's continuation of each row, by id, and who wrote them (see Writer.origin)."""
    found: dict[str, array[int]] = {}
    origin: list[dict[str, Any]] = []
    for batch in rows.cut(job.config.teacher.shard_rows):
        generated = engine.generate([row["prompt"] for row in batch], _generation(job))
        found |= {row["id"]: array("i", one.tokens) for row, one in zip(batch, generated, strict=True)}
        origin += [one for one in engine.origin() if one not in origin]
    return found, origin


def _generation(job: Job) -> Generation:
    settings = job.config.teacher
    return Generation(
        max_tokens=settings.max_tokens,
        stop_ids=job.config.target.stop_ids,
        top_k=settings.top_k,
        stop_on_repeat=settings.stop_on_repeat,
    )
