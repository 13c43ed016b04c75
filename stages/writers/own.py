"""The target in this process, on this machine's device."""

from typing import Any

from drafter.engine import Engine, Generated, Generation
from stages.job import Job
from stages.models.target import load_target


class Own:
    """Writes with the engine of `drafter/`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Return the greedy continuation of each prompt; see Engine.generate."""
        return self.engine.generate(prompts, settings)

    def origin(self) -> list[dict[str, Any]]:
        """Return nothing: the record's inputs, code and settings say how to write the same again."""
        return []


def open_writer(job: Job) -> Own:
    """Load the target.

    Raises:
        UserError: the target's files are missing, damaged or of another shape.
    """
    settings, target = job.config.teacher, job.config.target
    decoder = load_target(job.inputs["fetch"] / target.source, target.format, settings.dtype, job.device)
    return Own(Engine(decoder, settings.context_tokens, token_limit=target.token_count))
