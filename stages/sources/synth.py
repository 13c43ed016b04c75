"""User turns that the target invents itself: sampled after its user tag, steered by category.

The target never answers here; it writes what its training taught it that users write. Batches are seeded
by their number and kept in the stage's work folder, so a killed run loses one batch at most.
"""

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drafter.engine import Engine, Generated, Generation
from stages.files import read_jsonl, sha256_file, write_jsonl
from stages.models.target import load_target
from stages.profile import DataSource
from stages.sources import Context, Rejected, Row
from stages.sources.declared import declared
from stages.sources.plausibility import fault

STEERING = Path("stages/sources/templates/steering.toml")
BATCH_ROWS = 64        # at most; a source that wants few rows takes batches just above their number
SAMPLES_PER_ROW = 12   # so many tries for each row that is wanted, then it is enough
SYSTEM_SHARE = 0.7     # of the turns have a steering system prompt; the others the template's own
DTYPE = "bfloat16"     # these texts are samples: there is no exact value to keep
MARK = "\u2402"        # stands for the user's text while the template is cut open


class Sampler(Protocol):
    """What is needed of an engine."""

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Continue each prompt."""


@dataclass(frozen=True)
class Steering:
    """How one turn is begun: the template's arguments, and the turn's first words."""

    category: str
    system: str | None
    opening: str

    def prompt(self, context: Context) -> list[int]:
        """Return the ids up to the place where the target goes on with the user's turn."""
        messages = [{"role": "user", "content": MARK}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        arguments = context.job.config.target.template_arguments
        head, _, _ = context.tokenizer.render(messages, **arguments).partition(MARK)
        return context.tokenizer.encode(head + self.opening)


def rows(source: DataSource, context: Context, sampler: Sampler | None = None) -> Iterator[Row | Rejected]:
    """Yield invented turns, batch by batch, until there have been tries enough.

    Args:
        source: the profile's table.
        context: the job and its tokenizer.
        sampler: used in place of an engine over the target, which otherwise is loaded when first needed.
    """
    stops = context.job.config.target.stop_ids
    special = context.tokenizer.special_texts
    for number in range(-(-source.rows * SAMPLES_PER_ROW // _batch_rows(source))):
        steerings = _steerings(source, context, number)
        path = context.job.work / f"{source.id}-{number:05}.jsonl"
        if not path.is_file():
            prompts = [steering.prompt(context) for steering in steerings]
            sampler = sampler or _engine(source, context)
            settings = Generation(max_tokens=source.max_turn_tokens, stop_ids=stops, top_p=source.top_p,
                                  temperature=source.temperature, seed=_seed(source, context, number))
            samples = sampler.generate(prompts, settings)
            write_jsonl(path, ({"tokens": sample.tokens} for sample in samples))
        for index, (steering, tokens) in enumerate(zip(steerings, _read(path), strict=True)):
            ended = bool(tokens) and tokens[-1] in stops
            body = tokens[:-1] if ended else tokens
            text = (steering.opening + context.tokenizer.decode(body)).strip()
            reason = "unfinished" if not ended else fault(text, special)
            if len(tokens) < source.min_turn_tokens:
                reason = "short"
            message = {"role": "user", "content": text}
            yield Rejected(reason) if reason else Row(f"{number}-{index}", steering.category, (message,))


def _steerings(source: DataSource, context: Context, number: int) -> list[Steering]:
    tables = tomllib.loads((context.job.root / STEERING).read_text(encoding="utf-8"))["steering"]
    rng = random.Random(f"{context.job.seed}/{source.id}/{number}")  # noqa: S311
    chosen = []
    for index in range(_batch_rows(source)):
        table = tables[index % len(tables)]
        system = rng.choice(table["systems"]) if rng.random() < SYSTEM_SHARE else None
        chosen.append(Steering(table["category"], system, rng.choice(table["openings"])))
    return chosen


def _batch_rows(source: DataSource) -> int:
    return min(BATCH_ROWS, -(-source.rows * 5 // 32) * 8)  # a quarter more, in eights: one of each category


def _seed(source: DataSource, context: Context, number: int) -> int:
    return random.Random(f"{context.job.seed}/{source.id}/{number}/sampling").getrandbits(62)  # noqa: S311


def _engine(source: DataSource, context: Context) -> Engine:
    target = context.job.config.target
    folder = context.job.inputs["fetch"] / target.source
    decoder = load_target(folder, target.format, DTYPE, context.job.device)
    return Engine(decoder, context_tokens=target.max_prompt_tokens + source.max_turn_tokens,
                  token_limit=target.token_count)


def _read(path: Path) -> list[list[int]]:
    return [sample["tokens"] for sample in read_jsonl(path)]


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Name the target as the author."""
    target = context.job.config.target
    return {
        "author": f"the target, {target.name}", "revision": target.revision,
        "upstream": declared(context.job.root, target.source),
        "method": "user turns sampled after the target's user tag, steered by the file below",
        "temperature": source.temperature, "top_p": source.top_p,
        "files": {STEERING.as_posix(): sha256_file(context.job.root / STEERING)},
    }
