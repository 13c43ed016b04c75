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
from stages.files import digest_of, write_json, write_jsonl
from stages.job import Job
from stages.manifest import Tally, entry_of, manifest_of
from stages.models.tokenizer import Tokenizer, load_tokenizer
from stages.profile import CATEGORIES, Data, DataSource
from stages.sieve import Sieve, Sieved
from stages.sources import Context, Rejected, Row, load_kind
from stages.spool import Spool

SECTIONS = ("target", "data")
TAKES = ("fetch/{target.source}/*", "fetch/{data.sources.*.source}/*")
FILES = ("examples/*.jsonl", "stages/sources/templates/*.toml", "lock/sources.toml#{target.source}",
         "lock/sources.toml#{data.sources.*.source}", "{data.decontaminate.*}")
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
        tally, given = Tally(), hashlib.sha256()
        for split, row in job.progress(harvest.gathered(source, tally), source.rows, "prompt"):
            line = json.dumps(row, sort_keys=True, ensure_ascii=False)
            given.update(f"{split} {line}\n".encode())
            spools[split].add(f"{job.seed}/{row['id']}", line)
        _check_yield(source, tally, job)
        origin = load_kind(source.kind).origin(source, harvest.context)
        entries.append(entry_of(source, origin, tally))
        harvest.context.metrics.setdefault(source.id, {}).update(
            key=_key(source, origin, job), prompts_sha256=given.hexdigest())
    harvest.check_limits()
    _forget_others(job)
    counts = {split: spools[split].count for split in SPLITS} | {name: len(sets[name]) for name in SETS}
    for split in SPLITS:
        spools[split].write(job.out / f"{split}.jsonl")
    for name in SETS:
        write_jsonl(job.out / f"{name}.jsonl", (conversation.row(name) for conversation in sets[name]))
    manifest = manifest_of(job, entries, {name: len(sets[name]) for name in SETS})
    write_json(job.out / "data_manifest.json", manifest)
    dropped = {key: manifest["totals"][key] for key in ("conversations_dropped", "turns_dropped")}
    job.say(", ".join(f"{name} {count}" for name, count in counts.items()) + f"; dropped {dropped}")
    return {"prompts": counts, **dropped, "sources": harvest.context.metrics}


def _key(source: DataSource, origin: Mapping[str, Any], job: Job) -> str:
    """Digest what a source's rows come of, but for the code: two records tell by it which source changed.

    Whether what it gave is the same, all of it having passed the sieve behind the sources before it, the
    sha256 of its prompts tells.
    """
    return digest_of({"source": source.model_dump(mode="json"), "origin": origin, "seed": job.seed,
                      "target": job.config.target.model_dump(mode="json")})


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
        self._met: set[str] = set()
        self._begun: dict[str, set[bytes]] = {split: set() for split in SPLITS}
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
                    tally.conversations_dropped[row.reason] += 1
                else:
                    yield from self._prompts(source, next(sieved), tally)

    def _prompts(self, source: DataSource, one: Sieved, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
        """Count one conversation, and yield its prompts."""
        row, split = one.row, self._split(source, one)
        if split is None:
            tally.conversations_dropped[one.fault or "begins as one held apart from it"] += 1
            return
        tally.turns += len(one.turns)
        tally.turns_dropped.update(turn for turn in one.turns if isinstance(turn, str))
        self._met.add(row.category)
        for turn, ids in enumerate(one.turns):
            if isinstance(ids, str):
                continue
            if row.category in self._room:
                if not self._room[row.category]:
                    tally.turns_dropped["category full"] += 1
                    continue
                self._room[row.category] -= 1
            tally.keep(split, row)
            yield split, {
                "id": f"{source.id}/{tally.conversations}/{turn}", "category": row.category,
                "source": source.id, "family": row.family, "prompt": ids,
            }

    def _split(self, source: DataSource, one: Sieved) -> str | None:
        """Return the side of a conversation; None if it is faulty, or begins as one on the other side.

        Families stay whole, so it cannot follow that one; two that begin alike are nowhere on both sides.
        """
        if one.fault is not None:
            return None
        job = self.context.job
        share = job.config.data.heldout_share
        split = "heldout" if source.heldout else split_of(job.seed, one.row.family, share)
        if any(one.beginning in begun for name, begun in self._begun.items() if name != split):
            return None
        self._begun[split].add(one.beginning)
        return split

    def check_limits(self) -> None:
        """Refuse a limit of a category that no conversation had and nobody knows.

        Raises:
            UserError: there is one.
        """
        if unknown := sorted(self._room.keys() - self._met - set(CATEGORIES)):
            raise UserError(f"data.category_limits names {unknown[0]!r}, which no conversation is of; they "
                            f"are of {', '.join(sorted(self._met))}")


def split_of(seed: int, family: str, heldout_share: float) -> str:
    """Return 'heldout' or 'train' for a family: a function of its own name, whatever else there is."""
    digest = hashlib.sha256(f"{seed}/{family}".encode()).hexdigest()
    return "heldout" if int(digest[:12], 16) / 16**12 < heldout_share else "train"


def _check_yield(source: DataSource, tally: Tally, job: Job) -> None:
    if not tally.kept["heldout" if source.heldout else "train"]:
        use = "choosing" if source.heldout else "training"
        raise UserError(f"data source {source.id!r} keeps no row for {use} (dropped: {tally.reasons}): "
                        "raise its rows or data.max_prompt_tokens, or take it out of the profile")
    if tally.prompts < source.rows:
        job.say(f"source {source.id!r} has only {tally.prompts} of {source.rows} prompts; dropped: "
                f"{tally.reasons}")
