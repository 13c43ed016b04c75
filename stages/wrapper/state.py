"""Where a stage stands: up to date, or the reason why it would run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import digest_of
from stages.profile import Profile
from stages.wrapper.declaration import Declaration
from stages.wrapper.definition import NotReadyError, changes, define
from stages.wrapper.digests import Digests, differences
from stages.wrapper.record import Record, definition_of, key_of, read_record, subjects


@dataclass(frozen=True)
class State:
    """What is known of a stage before it runs.

    Attributes:
        definition: None if it cannot be known yet, because an upstream stage has not run.
        record: its record, if it has one.
        reason: why it has to run, or what it waits for; empty if it is up to date.
    """

    definition: dict[str, Any] | None
    record: Record | None
    reason: str

    @property
    def key(self) -> str:
        """The key, or nothing if it cannot be known yet."""
        return digest_of(self.definition) if self.definition is not None else ""


def state_of(root: Path, profile: Profile, declaration: Declaration, digests: Digests) -> State:
    """Compare a stage's definition and outputs with its record.

    Raises:
        UserError: the declaration and the profile or repository do not fit together.
    """
    record = read_record(root, profile.name, declaration.stage)
    try:
        definition = define(root, profile, declaration, digests)
    except NotReadyError as error:
        return State(None, record, str(error))
    if record is None:
        return State(definition, None, "it has no record")
    if key_of(record) != digest_of(definition):
        changed = changes(definition_of(record), definition)
        return State(definition, record, changed or "its record is damaged")
    faults = output_faults(root, profile.name, declaration, record, digests)
    return State(definition, record, faults[0] if faults else "")


def output_faults(root: Path, profile: str, declaration: Declaration, record: Record,
                  digests: Digests) -> list[str]:
    """Return a sentence for each output that is not as the record says."""
    folder = declaration.folder(root, profile)
    return differences(folder, subjects(record), digests, exact=not declaration.in_place)


def check_inputs(root: Path, profile: str, declarations: dict[str, Declaration],
                 definition: dict[str, Any], digests: Digests) -> None:
    """Make sure that what a stage is about to read is what the upstream records say.

    Raises:
        UserError: a file is missing or differs; the text names it.
    """
    stage = definition["stage"]
    for upstream in declarations[stage].upstream:
        folder = declarations[upstream].folder(root, profile)
        expected = {name.removeprefix(f"{upstream}/"): digest
                    for name, digest in definition["inputs"].items() if name.startswith(f"{upstream}/")}
        faults = differences(folder, expected, digests, exact=False)
        if faults:
            raise UserError(f"{stage}: {faults[0]}; make {upstream} repairs it")
