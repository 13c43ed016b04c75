"""Where the target takes over when it invents a user's turn: a conversation, rendered and cut open there.

Every lead belongs to a category and comes about in one of these ways:

    opening    the target's own frame, and the first words of a turn
    system     a system prompt that names the category, and first words
    subject    a system prompt that names a subject of the category, and first words
    beginning  the first part of a template's prompt, to be ended otherwise
    examples   two prompts of the category's templates as earlier turns
    follow-up  a template's prompt with an answer of the target's, to be followed up
"""

import random
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.models.tokenizer import Message
from stages.sources import Context
from stages.sources.library import load_library
from stages.sources.template import FOLDER, Filling, draw

STEERING = FOLDER / "steering.toml"
SHARES = {"opening": 0.2, "system": 0.2, "subject": 0.25, "beginning": 0.2, "examples": 0.05,
          "follow-up": 0.1}
BEGINNING_SHARE = (0.15, 0.6)  # of a prompt's words, when only its beginning is given
FOLLOWED_ROWS = 512            # in a smaller batch nothing is followed up: few answers cost as many steps
LONGEST_CHARACTERS = 400       # of a template's prompt that leads: long ones cost more than they steer
MARK = "\u2402"                # stands for the user's text while the template is cut open


@dataclass(frozen=True)
class Lead:
    """One turn to be invented.

    Attributes:
        category: one of `profile.CATEGORIES`.
        way: how it is led to, see above.
        before: the messages before the turn, which only steer; or, with `way` "follow-up", belong to it.
        opening: the turn's first words, given to the target.
        family: the template's that it comes of, if it comes of one alone.
    """

    category: str
    way: str
    before: tuple[Message, ...]
    opening: str
    family: str | None = None

    def text(self, context: Context) -> str:
        """Return the template's text up to the place where the target goes on with the user's turn."""
        arguments = context.job.config.target.template_arguments
        messages = [*self.before, _user(MARK)]
        return context.tokenizer.render(messages, **arguments).partition(MARK)[0] + self.opening


class Leads:
    """Draws leads, all categories in turn, each in a way of its own."""

    def __init__(self, root: Path) -> None:
        path = root / STEERING
        self._steering = tomllib.loads(path.read_text(encoding="utf-8"))["steering"]
        self._library = load_library(root / FOLDER)
        english = [template for template in self._library.templates if template.language == "en"]
        self._templates = {
            table["category"]: [one for one in english if one.category == table["category"]]
            for table in self._steering
        }

    def draw(self, rng: random.Random, count: int, wanted: Collection[str] = ()) -> Iterator[Lead]:
        """Yield leads; the same state of the generator gives the same ones.

        Args:
            rng: where they are drawn from.
            count: how many.
            wanted: the ways; all if empty.
        """
        shares = {way: share for way, share in SHARES.items()
                  if way in wanted or (not wanted and (way != "follow-up" or count >= FOLLOWED_ROWS))}
        ways = rng.choices(list(shares), list(shares.values()), k=count)
        for index, way in enumerate(ways):
            table = self._steering[index % len(self._steering)]
            category = table["category"]
            if way == "beginning":
                family, prompt = self._prompt(category, rng)
                yield Lead(category, way, (), _beginning(prompt, rng), family)
            elif way == "examples":
                shown = tuple(_user(self._prompt(category, rng)[1]) for _ in range(2))
                yield Lead(category, way, shown, "")
            elif way == "follow-up":
                family, prompt = self._prompt(category, rng)
                yield Lead(category, way, (_user(prompt),), "", family)
            else:
                yield Lead(category, way, self._system(way, table, rng), rng.choice(table["openings"]))

    def _system(self, way: str, table: dict[str, list[str]], rng: random.Random) -> tuple[Message, ...]:
        if way == "opening":
            return ()
        if way == "system":
            return ({"role": "system", "content": rng.choice(table["systems"])},)
        subject = Filling(self._library, rng).expand(rng.choice(table["subjects"]))
        return ({"role": "system", "content": f"The user writes about {subject}."},)

    def _prompt(self, category: str, rng: random.Random) -> tuple[str, str]:
        """Return a template's family and its first turn, the shortest of three if all are long."""
        drawn = []
        for _ in range(3):
            row = draw(self._library, rng.choice(self._templates[category]), f"{rng.getrandbits(62)}")
            drawn.append((row.family, row.messages[0]["content"]))
            if len(drawn[-1][1]) <= LONGEST_CHARACTERS:
                return drawn[-1]
        return min(drawn, key=lambda one: len(one[1]))


def _beginning(text: str, rng: random.Random) -> str:
    """Return the first words of a text, at least one and never all."""
    parts = text.split(" ")
    low, high = BEGINNING_SHARE
    return " ".join(parts[: min(max(1, round(rng.uniform(low, high) * len(parts))), len(parts) - 1)])


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
