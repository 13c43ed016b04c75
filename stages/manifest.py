"""data_manifest.json: where every training prompt came from, what was dropped and why, what only judges."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.decontamination import HELD_SHARE
from stages.files import sha256_file
from stages.job import Job
from stages.profile import DataSource
from stages.sources import Row
from stages.upstream.pinned import declared

LOG = "evidence/logs/data.log"  # of output/, as pack lays it out
USES = {"dev": "choosing only, never trained on",
        "examples": "reporting only, neither trained on nor chosen on"}


@dataclass
class Tally:
    """What became of one source's conversations, and of the user turns of those not dropped whole."""

    conversations: int = 0
    turns: int = 0
    conversations_dropped: Counter[str] = field(default_factory=Counter)
    turns_dropped: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)

    @property
    def prompts(self) -> int:
        """Prompts kept, those held out included."""
        return self.kept.total()

    @property
    def reasons(self) -> str:
        """What was dropped and why, in words."""
        dropped = self.conversations_dropped + self.turns_dropped
        return ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "none read"

    def keep(self, split: str, row: Row) -> None:
        """Count one prompt of a conversation."""
        self.kept[split] += 1
        self.categories[row.category] += 1
        self.languages[row.language] += 1


def entry_of(source: DataSource, origin: Mapping[str, Any], tally: Tally) -> dict[str, Any]:
    """Return the manifest's table of one source: its origin, and what became of its rows.

    What is read is what is dropped and what is kept; `log` is a file of output/.
    """
    return {"split": source.split, "log": LOG} | dict(origin) | {
        "id": source.id, "kind": source.kind, "use": "choosing only" if source.heldout else "training",
        "conversations_read": tally.conversations, "conversations_dropped": dict(tally.conversations_dropped),
        "turns_read": tally.turns, "turns_dropped": dict(tally.turns_dropped),
        "prompts_kept": tally.prompts, "prompts_by_split": dict(tally.kept),
        "prompts_by_category": dict(tally.categories), "prompts_by_language": dict(tally.languages),
    }


def manifest_of(job: Job, entries: Sequence[Mapping[str, Any]], judged: Mapping[str, int]) -> dict[str, Any]:
    """Return the whole manifest; `judged` holds the number of conversations of each evaluation set."""
    data, target = job.config.data, job.config.target
    evaluation = {
        name: {"conversations": count, "file": f"examples/{name}.jsonl", "use": USES[name],
               "sha256": sha256_file(job.root / "examples" / f"{name}.jsonl")}
        for name, count in judged.items()
    }
    against = {name: sha256_file(job.root / name) for name in data.decontaminate}
    return {
        "seed": job.seed, "sources": list(entries), "evaluation": evaluation,
        "filters": {"max_prompt_tokens": data.max_prompt_tokens, "shared_words": data.shared_words,
                    "near_duplicate": data.near_duplicate, "near_evaluation": data.near_evaluation,
                    "held_of_evaluation": HELD_SHARE,
                    "category_limits": dict(data.category_limits), "heldout_share": data.heldout_share,
                    "decontaminated_against": against},
        "target": declared(job.root, target.source) | {
            "name": target.name, "revision": target.revision, "use": "template, tokenizer, sampling"},
        "totals": {
            **{key: sum(entry[key] for entry in entries)
               for key in ("conversations_read", "turns_read", "prompts_kept")},
            **{key: _summed(entries, key)
               for key in ("conversations_dropped", "turns_dropped", "prompts_by_split",
                           "prompts_by_category", "prompts_by_language")},
        },
    }


def _summed(entries: Sequence[Mapping[str, Any]], key: str) -> dict[str, int]:
    found = Counter[str]()
    for entry in entries:
        found.update(entry[key])
    return dict(sorted(found.items()))
