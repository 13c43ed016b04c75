"""What writes the teacher's continuations: a module for each value of teacher.engine, with `open_writer`."""

from typing import Any, Protocol

from drafter.engine import Generated, Generation


class Writer(Protocol):
    """What continues the prompts of a shard: the engine in this process, or something of its like."""

    def generate(self, prompts: list[list[int]], settings: Generation) -> list[Generated]:
        """Return the greedy continuation of each prompt, with its top-k; an empty one is left out."""

    def origin(self) -> list[dict[str, Any]]:
        """Return who wrote what was generated last, if that cannot be written again from what is recorded."""
