"""Prompts for training and for choosing, drawn from the profile's sources and sieved.

Conversations are held out by family (template, or conversation) within their source, before any cutting
into turns; then every user turn becomes a prompt. Dev and example conversations are only evaluated.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stages.decontamination import Contaminants, words
from stages.errors import UserError
from stages.evaluation import SETS, Conversation, read_set
from stages.files import sha256_file, write_atomic, write_json, write_jsonl
from stages.job import Job
from stages.models.tokenizer import load_tokenizer
from stages.profile import DataSource
from stages.sieve import Sieve, Sieved
from stages.sources import Context, Rejected, Row, load_kind
from stages.sources.declared import declared

SECTIONS = ("target", "data")
TAKES = ("fetch/{target.source}/*", "fetch/{data.sources.*.source}/*")
FILES = ("examples/*.jsonl", "stages/sources/templates/*.toml", "lock/sources.toml")
LIBRARIES = ("torch", "transformers", "tokenizers", "jinja2", "gguf", "rensa", "datasets")
PLUGINS = (("data.sources.*.kind", "stages.sources"),)

SPLITS = ("train", "heldout")
CHUNK_ROWS = 1024      # are tokenised and sketched at once
DRAWS_PER_PROMPT = 40  # a source that keeps less than one draw in forty has no more to give


@dataclass
class Tally:
    """What became of one source's conversations and prompts."""

    conversations: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)

    @property
    def prompts(self) -> int:
        """Prompts kept, those held out included."""
        return self.kept.total()


def run(job: Job) -> dict[str, object]:
    """Fill job.out with train.jsonl, heldout.jsonl, dev.jsonl, examples.jsonl and data_manifest.json.

    Raises:
        UserError: an evaluation prompt is too long, or a source keeps nothing.
    """
    target, data = job.config.target, job.config.data
    tokenizer = load_tokenizer(job.inputs["fetch"] / target.source, target.format)
    sets = {name: read_set(job.root, name, tokenizer, target) for name in SETS}
    contaminants = Contaminants(data.shared_words)
    for conversation in (conversation for name in SETS for conversation in sets[name]):
        contaminants.add([words(text) for text in conversation.texts])
    sieve = Sieve(tokenizer, contaminants, data.max_prompt_tokens, data.near_duplicate,
                  target.template_arguments)
    context = Context(job, tokenizer)
    lines: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    entries = []
    for source in data.sources:
        tally = Tally()
        for split, row in job.progress(_gathered(source, context, sieve, tally), source.rows, "prompt"):
            key = _digest(f"{job.seed}/{row['id']}")
            lines[split].append((key, json.dumps(row, sort_keys=True, ensure_ascii=False)))
        _check_yield(source, tally, job)
        entries.append(_entry(source, context, tally))
    for split in SPLITS:  # the order is a shuffle that adding a source does not disturb
        write_atomic(job.out / f"{split}.jsonl", "".join(f"{line}\n" for _, line in sorted(lines[split])))
    for name in SETS:
        write_jsonl(job.out / f"{name}.jsonl", (conversation.row(name) for conversation in sets[name]))
    write_json(job.out / "data_manifest.json", _manifest(job, entries, sets))
    dropped = sum((Counter(entry["dropped"]) for entry in entries), Counter[str]())
    counts = {split: len(lines[split]) for split in SPLITS} | {name: len(sets[name]) for name in SETS}
    job.say(", ".join(f"{name} {count}" for name, count in counts.items()) + f"; dropped {dict(dropped)}")
    return {"prompts": counts, "dropped": dict(sorted(dropped.items()))}


def _gathered(source: DataSource, context: Context, sieve: Sieve, tally: Tally
              ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (split, prompt row) until the source's number of prompts is reached or it has no more."""
    found = load_kind(source.kind).rows(source, context)
    while chunk := list(islice(found, min(CHUNK_ROWS, max(1, source.rows - tally.prompts)))):
        sieved = sieve.pass_through([row for row in chunk if isinstance(row, Row)])
        for row in chunk:
            if tally.prompts >= source.rows or tally.conversations >= source.rows * DRAWS_PER_PROMPT:
                return
            tally.conversations += 1
            if isinstance(row, Rejected):
                tally.dropped[row.reason] += 1
            else:
                yield from _prompts(source, context, next(sieved), tally)


def _prompts(source: DataSource, context: Context, one: Sieved, tally: Tally
             ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Count one conversation, and yield its prompts."""
    row = one.row
    tally.dropped.update(turn for turn in (one.fault, *one.turns) if isinstance(turn, str))
    split = split_of(context.job.seed, source.id, row.family, context.job.config.data.heldout_share)
    for turn, ids in enumerate(one.turns):
        if isinstance(ids, str):
            continue
        tally.kept[split] += 1
        tally.categories[row.category] += 1
        tally.languages[row.language] += 1
        yield split, {
            "id": f"{source.id}/{row.family}/{tally.conversations}/{turn}", "category": row.category,
            "source": source.id, "family": f"{source.id}/{row.family}", "prompt": ids,
        }


def split_of(seed: int, source: str, family: str, heldout_share: float) -> str:
    """Return 'heldout' or 'train' for a family: a function of its own name, whatever else there is."""
    place = int(_digest(f"{seed}/{source}/{family}")[:12], 16) / 16**12
    return "heldout" if place < heldout_share else "train"


def _check_yield(source: DataSource, tally: Tally, job: Job) -> None:
    reasons = ", ".join(f"{reason} {count}" for reason, count in tally.dropped.most_common()) or "none read"
    if not tally.kept["train"]:
        raise UserError(f"data source {source.id!r} keeps no row for training (dropped: {reasons}): "
                        "raise its rows or data.max_prompt_tokens, or take it out of the profile")
    if tally.prompts < source.rows:
        job.say(f"source {source.id!r} has only {tally.prompts} of {source.rows} prompts; dropped: {reasons}")


def _entry(source: DataSource, context: Context, tally: Tally) -> dict[str, Any]:
    return load_kind(source.kind).origin(source, context) | {
        "id": source.id, "kind": source.kind, "conversations_read": tally.conversations,
        "prompts_kept": tally.prompts, "prompts_by_split": dict(tally.kept), "dropped": dict(tally.dropped),
        "prompts_by_category": dict(tally.categories), "prompts_by_language": dict(tally.languages),
    }


def _manifest(job: Job, entries: list[dict[str, Any]], sets: Mapping[str, list[Conversation]]
              ) -> dict[str, Any]:
    data, target = job.config.data, job.config.target
    evaluation = {
        name: {"conversations": len(sets[name]), "file": f"examples/{name}.jsonl", "use": "evaluation only",
               "sha256": sha256_file(job.root / "examples" / f"{name}.jsonl")}
        for name in SETS
    }
    return {
        "seed": job.seed, "sources": entries, "evaluation": evaluation,
        "filters": {"max_prompt_tokens": data.max_prompt_tokens, "shared_words": data.shared_words,
                    "heldout_share": data.heldout_share},
        "target": declared(job.root, target.source) | {
            "name": target.name, "revision": target.revision, "use": "template, tokenizer, sampling"},
        "totals": {"prompts_kept": sum(entry["prompts_kept"] for entry in entries),
                   "conversations_read": sum(entry["conversations_read"] for entry in entries)},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
