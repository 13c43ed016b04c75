"""Hash everything anew and compare it with the records of a profile.

    python -m stages.verify --profile smollm2

Each record's key is computed again from the record alone. Exit code 1 if anything differs.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from stages.errors import UserError
from stages.files import digest_of
from stages.profile import load_profile
from stages.wrapper.declaration import read_declarations
from stages.wrapper.digests import Digests
from stages.wrapper.place import hold
from stages.wrapper.record import definition_of, key_of, read_record, record_path, subjects
from stages.wrapper.state import output_faults

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Verify a profile's records; return 0, 1 if something differs, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m stages.verify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile, ROOT / "profiles").name
        with hold(ROOT):
            faults = list(verify(ROOT, profile))
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    for fault in faults:
        print(f"draftmill: {fault}", file=sys.stderr)
    return 1 if faults else 0


def verify(root: Path, profile: str) -> Iterator[str]:
    """Yield a sentence for each file or record that is not as it should be, and print what holds.

    Raises:
        UserError: the profile has no record at all.
    """
    seen, digests = False, Digests(root, remember=False)
    upstream: dict[str, str] = {}
    for stage, declaration in read_declarations(root).items():
        record = read_record(root, profile, stage)
        if record is None:
            damaged = record_path(root, profile, stage).exists()
            seen = seen or damaged
            print(f"{stage}: no record")
            if damaged:
                yield f"logs/{profile}/{stage}.json is not a record"
            continue
        seen = True
        faults = output_faults(root, profile, declaration, record, digests)
        if digest_of(definition_of(record)) != key_of(record):
            faults.append(f"logs/{profile}/{stage}.json: its key does not follow from its definition")
        faults += [f"{stage} was made from another {name} than is recorded upstream"
                   for name, digest in definition_of(record)["inputs"].items()
                   if upstream.get(name) != digest]
        upstream |= {f"{stage}/{name}": digest for name, digest in subjects(record).items()}
        print(f"{stage}: {len(subjects(record))} files, {'as recorded' if not faults else 'NOT as recorded'}")
        yield from faults
    if not seen:
        raise UserError(f"profile {profile} has no records yet: make all PROFILE={profile}")


if __name__ == "__main__":
    sys.exit(main())
