"""Where a drafter stands: its tau on each set, beside the baselines on the same conversations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter.replay import Conversation, Draft, Steps, paired, read_conversations, replay_offline, summary
from stages.rehearsal.baselines import prompt_lookup, trigrams_of


def standing(sets: Mapping[str, Path], replays: Mapping[str, Any], teacher: Path) -> dict[str, Any]:
    """Sum up the replays of each set, and replay the baselines on the same conversations.

    Args:
        sets: name -> file of conversations.
        replays: name -> a replay as the rehearsal reports it (with `steps`); sets without one are left out.
        teacher: the folder of training shards, for the trigram table.

    Returns:
        `tau`: set -> Tau; `baselines`: set -> baseline -> Tau, and `difference`, the drafter's tau less its.
    """
    found: dict[str, Any] = {"tau": {}, "baselines": {}}
    if not replays:
        return found
    drafts: dict[str, Draft] = {"trigram": trigrams_of(teacher).draft, "prompt lookup": prompt_lookup}
    for name in sorted(sets.keys() & replays.keys()):
        conversations = read_conversations(sets[name])
        steps = [_steps(row) for row in replays[name]["steps"]]
        found["tau"][name] = summary(conversations, steps).to_json()
        found["baselines"][name] = {
            baseline: _beside(conversations, steps, draft) for baseline, draft in drafts.items()
        }
    return found


def _beside(conversations: Sequence[Conversation], steps: Sequence[Steps], draft: Draft) -> dict[str, Any]:
    others = [replay_offline(conversation, draft) for conversation in conversations]
    return summary(conversations, others).to_json() | {"difference": paired(steps, others).to_json()}


def _steps(row: dict[str, Any]) -> Steps:
    return Steps(tuple(row["accepted"]), tuple(row["offered"]), row["tokens"])
