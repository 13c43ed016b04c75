"""Prompts for training and for choosing, drawn from the profile's sources and sieved.

Conversations are held out by family (template, or conversation) or by whole source, before any cutting into
turns; then every user turn becomes a prompt. Dev and example conversations are only evaluated. Rows stream
through: what is remembered of each is a digest and a sketch.
"""

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from stages.decontamination import Contaminants, words
from stages.errors import UserError
from stages.evaluation import SETS, Conversation, read_set, read_texts
from stages.files import write_json, write_jsonl
from stages.job import Job
from stages.manifest import Tally, entry_of, manifest_of
from stages.models.tokenizer import Tokenizer, load_tokenizer
from stages.profile import Data, DataSource
from stages.sieve import Sieve, Sieved
from stages.sources import Context, Rejected, Row, load_kind
from stages.spool import Spool

SECTIONS = ("target", "data")
TAKES = ("fetch/{target.source}/*", "fetch/{data.sources.*.source}/*")
FILES = ("examples/*.jsonl", "stages/sources/templates/*.toml", "lock/sources.toml",
         "{data.decontaminate.*}")
LIBRARIES = ("torch", "transformers", "tokenizers", "jinja2", "gguf", "rensa", "datasets")
PLUGINS = (("data.sources.*.kind", "stages.sources"),)

SPLITS = ("train", "heldout")
CHUNK_ROWS = 1024      # are tokenised and sketched at once
DRAWS_PER_PROMPT = 40  # a source that keeps less than one draw in forty has no more to give


def run(job: Job) -> dict[str, object]:
    """Fill job.out with train.jsonl, heldout.jsonl, dev.jsonl, examples.jsonl and data_manifest.json.

    Raises:
        UserError: an evaluation prompt is too long, or a source keeps nothing.
    """
    target, data = job.config.target, job.config.data
    tokenizer = load_tokenizer(job.inputs["fetch"] / target.source, target.format)
    sets = {name: read_set(job.root, name, tokenizer, target) for name in SETS}
    harvest = Harvest(Context(job, tokenizer), _contaminants(job, sets, tokenizer))
    spools = {split: Spool(job.work / split) for split in SPLITS}
    entries = []
    for source in data.sources:
        tally = Tally()
        for split, row in job.progress(harvest.gathered(source, tally), source.rows, "prompt"):
            line = json.dumps(row, sort_keys=True, ensure_ascii=False)
            spools[split].add(f"{job.seed}/{row['id']}", line)
        _check_yield(source, tally, job)
        entries.append(entry_of(source, load_kind(source.kind).origin(source, harvest.context), tally))
    _forget_others(job)
    counts = {split: spools[split].count for split in SPLITS} | {name: len(sets[name]) for name in SETS}
    for split in SPLITS:
        spools[split].write(job.out / f"{split}.jsonl")
    for name in SETS:
        write_jsonl(job.out / f"{name}.jsonl", (conversation.row(name) for conversation in sets[name]))
    manifest = manifest_of(job, entries, {name: len(sets[name]) for name in SETS})
    write_json(job.out / "data_manifest.json", manifest)
    dropped = manifest["totals"]["dropped"]
    job.say(", ".join(f"{name} {count}" for name, count in counts.items()) + f"; dropped {dropped}")
    return {"prompts": counts, "dropped": dropped, "sources": harvest.context.metrics}


def _forget_others(job: Job) -> None:
    """Remove what was kept for sources that the profile has no more."""
    ids = {source.id for source in job.config.data.sources}
    for folder in job.kept.glob("*"):
        if folder.name not in ids:
            shutil.rmtree(folder)


def _contaminants(job: Job, sets: Mapping[str, list[Conversation]], tokenizer: Tokenizer) -> Contaminants:
    data: Data = job.config.data
    found = Contaminants(data.shared_words, data.near_evaluation)
    for name, conversations in sets.items():
        for conversation in conversations:
            found.add(name, [words(text) for text in conversation.texts])
    for name in data.decontaminate:
        for texts in read_texts(job.root / name, tokenizer, job.config.target):
            found.add(name, [words(text) for text in texts])
    return found


class Harvest:
    """Turns sources into prompts, one source after the other; each is compared with all before it."""

    def __init__(self, context: Context, contaminants: Contaminants) -> None:
        self.context = context
        data, target = context.job.config.data, context.job.config.target
        asked = sum(source.rows for source in data.sources)
        self._room = Counter({name: math.ceil(share * asked) for name, share in data.category_limits.items()})
        self._sieve = Sieve(context.tokenizer, contaminants, data.max_prompt_tokens, data.near_duplicate,
                            target.template_arguments)

    def gathered(self, source: DataSource, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (split, prompt row) until the source's number of prompts is reached or it has no more."""
        found = load_kind(source.kind).rows(source, self.context)
        while chunk := list(islice(found, min(CHUNK_ROWS, max(1, source.rows - tally.prompts)))):
            sieved = self._sieve.pass_through([row for row in chunk if isinstance(row, Row)])
            for row in chunk:
                if tally.prompts >= source.rows or tally.conversations >= source.rows * DRAWS_PER_PROMPT:
                    return
                tally.conversations += 1
                if isinstance(row, Rejected):
                    tally.dropped[row.reason] += 1
                else:
                    yield from self._prompts(source, next(sieved), tally)

    def _prompts(self, source: DataSource, one: Sieved, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
        """Count one conversation, and yield its prompts."""
        row, job = one.row, self.context.job
        tally.dropped.update(turn for turn in (one.fault, *one.turns) if isinstance(turn, str))
        split = "heldout" if source.heldout else split_of(job.seed, row.family, job.config.data.heldout_share)
        for turn, ids in enumerate(one.turns):
            if isinstance(ids, str):
                continue
            if row.category in self._room:
                if not self._room[row.category]:
                    tally.dropped["category full"] += 1
                    continue
                self._room[row.category] -= 1
            tally.keep(split, row)
            yield split, {
                "id": f"{source.id}/{tally.conversations}/{turn}", "category": row.category,
                "source": source.id, "family": row.family, "prompt": ids,
            }


def split_of(seed: int, family: str, heldout_share: float) -> str:
    """Return 'heldout' or 'train' for a family: a function of its own name, whatever else there is."""
    digest = hashlib.sha256(f"{seed}/{family}".encode()).hexdigest()
    return "heldout" if int(digest[:12], 16) / 16**12 < heldout_share else "train"


def _check_yield(source: DataSource, tally: Tally, job: Job) -> None:
    reasons = ", ".join(f"{reason} {count}" for reason, count in tally.dropped.most_common()) or "none read"
    if not tally.kept["heldout" if source.heldout else "train"]:
        use = "choosing" if source.heldout else "training"
        raise UserError(f"data source {source.id!r} keeps no row for {use} (dropped: {reasons}): "
                        "raise its rows or data.max_prompt_tokens, or take it out of the profile")
    if tally.prompts < source.rows:
        job.say(f"source {source.id!r} has only {tally.prompts} of {source.rows} prompts; dropped: {reasons}")
