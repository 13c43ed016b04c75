"""User turns that the target invents itself: sampled after its user tag, led there in several ways.

Only to be followed up does the target answer; otherwise it writes what its training taught it that users
write. Batches are seeded by their number and kept under a key of what they come of, so a killed run loses one
batch at most, and a change to another source none. They are made in a thread, ahead of their being sieved.
"""

import random
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from drafter.engine import Engine, Generated, Generation
from stages.decontamination import words
from stages.files import digest_of, read_jsonl, sha256_file, write_jsonl
from stages.models.target import load_target
from stages.profile import DataSource
from stages.sources import Context, Rejected, Row
from stages.sources.languages import guess
from stages.sources.leads import STEERING, Lead, Leads
from stages.sources.plausibility import fault
from stages.sources.template import FOLDER
from stages.upstream.pinned import declared
from stages.wrapper.code import code_digests

BATCH_ROWS = {"cpu": 64, "cuda": 8_192}  # at most; a source that wants few rows takes little more at once
SAMPLES_PER_ROW = 12  # so many tries for each row that is wanted, then it is enough
DTYPE = "bfloat16"    # these texts are samples: there is no exact value to keep
_SENTENCE_END = re.compile(r"[.!?:](?=\s|$)")


class Sampler(Protocol):
    """What is needed of an engine."""

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Continue each prompt."""


def rows(source: DataSource, context: Context, sampler: Sampler | None = None) -> Iterator[Row | Rejected]:
    """Yield invented turns, batch by batch, until there have been tries enough.

    Args:
        source: the profile's table.
        context: the job and its tokenizer.
        sampler: used in place of an engine over the target, which otherwise is loaded when first needed.
    """
    if "synth" not in context.shared:
        context.shared["synth"] = _Batches(context, sampler)
    batches: _Batches = context.shared["synth"]
    for number in range(-(-source.rows * SAMPLES_PER_ROW // batches.size(source))):
        for index, one in enumerate(read_jsonl(batches.file(source, number))):
            reason = one["fault"]
            family = one["family"] or f"{source.id}/{one['way']}/{number}-{index}"
            messages = tuple(one["messages"])
            language = guess(words(messages[-1]["content"]))
            yield Rejected(reason) if reason else Row(family, one["category"], messages, language)


class _Batches:
    """The batches of all sources of this kind, made one after the other in a thread of their own.

    While the rows of one are looked at, the next that is sure to be wanted is made. What is in a batch does
    not depend on when it is made.
    """

    def __init__(self, context: Context, sampler: Sampler | None) -> None:
        self._context, self._sampler = context, sampler
        self._leads = Leads(context.job.root)
        self._thread = ThreadPoolExecutor(1)
        self._files: dict[tuple[str, int], Future[Path]] = {}
        self._folders: dict[str, Path] = {}

    def size(self, source: DataSource) -> int:
        """Return how many turns a batch has."""
        most = BATCH_ROWS[self._context.job.device]
        return min(most, -(-source.rows * 5 // 32) * 8)  # a quarter more than wanted, in eights: one of each

    def file(self, source: DataSource, number: int) -> Path:
        """Return a batch's file once it is written."""
        asked = self._asked(source, number)
        following = self._following(source, number)
        if following is not None:
            self._asked(*following)
        return asked.result()

    def _following(self, source: DataSource, number: int) -> tuple[DataSource, int] | None:
        """Return the batch after this one that will be wanted even if next to nothing is dropped."""
        if (number + 1) * self.size(source) < source.rows:
            return source, number + 1
        synths = [one for one in self._context.job.config.data.sources if one.kind == source.kind]
        later = [one for one in synths[synths.index(source) + 1 :] if (one.id, 0) not in self._files]
        return (later[0], 0) if later else None

    def _asked(self, source: DataSource, number: int) -> "Future[Path]":
        key = (source.id, number)
        if key not in self._files:
            self._files[key] = self._thread.submit(self._made, source, number)
        return self._files[key]

    def _made(self, source: DataSource, number: int) -> Path:
        size = self.size(source)
        if source.id not in self._folders:
            self._folders[source.id] = _folder(source, self._context, size)
        path = self._folders[source.id] / f"{number:05}.jsonl"
        report = self._context.metrics.setdefault(source.id, {"batches_kept": 0, "batches_sampled": 0})
        report["batches_kept" if path.is_file() else "batches_sampled"] += 1
        if not path.is_file():
            self._sampler = self._sampler or _engine(self._context)
            batch = _Batch(source, self._context, self._sampler, number)
            write_jsonl(path, batch.invented(self._leads, size))
        return path


class _Batch:
    """One batch of turns, and what it is sampled with."""

    def __init__(self, source: DataSource, context: Context, sampler: Sampler, number: int) -> None:
        self._context = context
        self._sampler = sampler
        self._least, self._ways = source.min_turn_tokens, source.ways
        self._random = random.Random(f"{context.job.seed}/{source.id}/{number}")  # noqa: S311
        self._stops = context.job.config.target.stop_ids
        self._settings = Generation(max_tokens=source.max_turn_tokens, stop_ids=self._stops,
                                    temperature=source.temperature, top_p=source.top_p)

    def invented(self, leads: Leads, count: int) -> Iterator[dict[str, Any]]:
        """Yield the turns with their category, their way and what is wrong with them, if anything."""
        drawn = self._answered(list(leads.draw(self._random, count, self._ways)))
        samples = self._sampled([lead.text(self._context) for lead in drawn])
        special = self._context.tokenizer.special_texts
        for lead, (text, tokens, ended) in zip(drawn, samples, strict=True):
            turn = (lead.opening + text).strip()
            reason = "unfinished" if not ended else fault(turn, special)
            if tokens < self._least:
                reason = "short"
            kept = lead.before if lead.way == "follow-up" else ()
            messages = [*kept, {"role": "user", "content": turn}]
            yield {"category": lead.category, "way": lead.way, "family": lead.family, "messages": messages,
                   "fault": reason}

    def _answered(self, leads: list[Lead]) -> list[Lead]:
        """Give the turns that are to be followed up an answer of the target's, to its last whole sentence."""
        asked = [index for index, lead in enumerate(leads) if lead.way == "follow-up"]
        render, arguments = self._context.tokenizer.render, self._context.job.config.target.template_arguments
        samples = self._sampled([render(leads[index].before, **arguments) for index in asked])
        for index, (text, _, ended) in zip(asked, samples, strict=True):
            answer = text.strip() if ended else _whole_sentences(text).strip()
            message = {"role": "assistant", "content": answer}
            leads[index] = replace(leads[index], before=(*leads[index].before, message))
        return leads

    def _sampled(self, texts: list[str]) -> list[tuple[str, int, bool]]:
        """Continue texts; return what came, in how many tokens, and whether it ended by itself."""
        if not texts:
            return []
        settings = replace(self._settings, seed=self._random.getrandbits(62))
        tokenizer = self._context.tokenizer
        found = [one.tokens for one in self._sampler.generate(tokenizer.encode_batch(texts), settings)]
        ended = [bool(tokens) and tokens[-1] in self._stops for tokens in found]
        bodies = [tokens[:-1] if end else tokens for tokens, end in zip(found, ended, strict=True)]
        return list(zip(tokenizer.decode_batch(bodies), map(len, found), ended, strict=True))


def _whole_sentences(text: str) -> str:
    """Return a text up to the end of its last whole sentence; all of it if there is none."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text


def _folder(source: DataSource, context: Context, size: int) -> Path:
    """Return where the batches of this source lie: named by all that they are a function of."""
    job = context.job
    key = digest_of({
        "source": source.model_dump(mode="json", exclude={"rows"}), "batch_rows": size,
        "target": job.config.target.model_dump(mode="json"), "seed": job.seed, "device": job.device,
        "files": declared(job.root, job.config.target.source)["files"],
        "templates": {path.name: sha256_file(path) for path in sorted((job.root / FOLDER).glob("*.toml"))},
        "code": code_digests(job.root, [__name__]), "torch": version("torch"),
    })
    parent = job.kept / source.id
    for other in parent.glob("*"):
        if other.name != key[:16]:
            shutil.rmtree(other)
    return parent / key[:16]


def _engine(context: Context) -> Engine:
    target = context.job.config.target
    folder = context.job.inputs["fetch"] / target.source
    decoder = load_target(folder, target.format, DTYPE, context.job.device)
    longest = max(one.max_turn_tokens for one in context.job.config.data.sources if one.kind == "synth")
    return Engine(decoder, context_tokens=target.max_prompt_tokens + longest, token_limit=target.token_count)


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Name the target as the author."""
    target = context.job.config.target
    upstream = declared(context.job.root, target.source)
    return {
        "author": f"the target, {target.name}", "uri": upstream["uri"], "revision": target.revision,
        "licence": upstream["licence"],
        "upstream": upstream,
        "method": "user turns sampled after the target's user tag, led by the file below and the templates",
        "command": "make data", "temperature": source.temperature, "top_p": source.top_p,
        "files": {STEERING.as_posix(): sha256_file(context.job.root / STEERING)},
    }
