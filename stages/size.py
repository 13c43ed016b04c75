"""What a submission weighs: every file as the grader would copy it, by component, against the limit.

Usage: python -m stages.size [FOLDER] [--profile NAME] [--json]
Exit code 0: within the limit; 1: over it, or with files that cannot be copied; 2: no such folder or profile.
"""

import argparse
import json
import os
import stat
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.table import Table

from stages.display import console
from stages.errors import UserError
from stages.profile import Limits, load_profile

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = ("weights", "wheels", "code", "evidence", "other")


@dataclass(frozen=True)
class File:
    """A file as it will be copied: a link stands for the file that it leads to.

    Attributes:
        name: relative to the submission, '/'-separated.
        path: where its bytes are.
        size_bytes: apparent size; holes of a sparse file count, and each of two hard links does.
    """

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class Survey:
    """The files of a submission in order of name, and what cannot be copied: (name, reason)."""

    files: tuple[File, ...]
    faults: tuple[tuple[str, str], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that the grader would copy."""
        return sum(file.size_bytes for file in self.files)

    def by_component(self) -> dict[str, int]:
        """Return bytes by component: every component, in the order of COMPONENTS."""
        found: Counter[str] = Counter()
        for file in self.files:
            found[component(file.name)] += file.size_bytes
        return {name: found[name] for name in COMPONENTS}


def component(name: str) -> str:
    """Return which component a file of the submission belongs to, from its name."""
    top, *below = PurePosixPath(name).parts
    if not below:
        return "weights" if top.endswith(".safetensors") else "code" if top == "serve.sh" else "other"
    return {"drafter": "code", "wheels": "wheels", "evidence": "evidence"}.get(top, "other")


def survey(folder: Path) -> Survey:
    """Look at everything under a folder without following links to folders.

    Raises:
        UserError: the folder is not there.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Run make pack, or name a submission.")
    files, faults = [], []
    for parent, folders, names in os.walk(folder, onerror=_stop):
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]
        for entry in names + linked:
            path = Path(parent) / entry
            name = path.relative_to(folder).as_posix()
            try:
                real = path if _is_utf8(name) and not path.is_symlink() else _follow(folder, name)
                status = real.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise _UncopiableError("is neither a file nor a folder")
                files.append(File(name, real, status.st_size))
            except _UncopiableError as fault:
                faults.append((os.fsencode(name).decode(errors="backslashreplace"), str(fault)))
    return Survey(tuple(sorted(files, key=lambda file: file.name)), tuple(sorted(faults)))


class _UncopiableError(Exception):
    """The grader would not copy this entry; the text says why."""


def _stop(error: OSError) -> None:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _UncopiableError("has a name that is not UTF-8") from error
    return True


def _follow(folder: Path, name: str) -> Path:
    """Return the file that a link leads to, hop by hop: each one relative and inside the folder."""
    hops = [name]
    while (folder / hops[-1]).is_symlink():
        target = str((folder / hops[-1]).readlink())
        if target.startswith("/"):
            raise _UncopiableError(f"is a link to an absolute path ({target})")
        following = _within(PurePosixPath(hops[-1]).parent, target)
        if following in hops:
            raise _UncopiableError(f"is a link that leads back to itself ({' -> '.join([*hops, following])})")
        hops.append(following)
    real = folder / hops[-1]
    if not real.resolve().is_relative_to(folder.resolve()):
        raise _UncopiableError(f"is a link that leads out of the submission ({hops[-1]})")
    if not real.exists():
        raise _UncopiableError(f"is a link to a file that is not there ({hops[-1]})")
    if real.is_dir():
        raise _UncopiableError(f"is a link to a folder ({hops[-1]}); only links to files are copied")
    return real


def _within(parent: PurePosixPath, target: str) -> str:
    """Return where a relative link leads, as a name in the submission, watching that it never leaves it."""
    parts = list(parent.parts)
    for part in PurePosixPath(target).parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            raise _UncopiableError(f"is a link that leads out of the submission ({target})")
    return "/".join(parts)


def table(found: Survey, limits: Limits) -> Table:
    """Return the components against the limit, for people."""
    parts = found.by_component()
    rest = found.total_bytes - parts["weights"]
    sheet = Table("component", "files", "bytes", "of", title="submission by component")
    for column in sheet.columns[1:]:
        column.justify = "right"
    count = Counter(component(file.name) for file in found.files)
    allowed = {"weights": f"{limits.allotment_bytes:,}"}
    for name, size in parts.items():
        sheet.add_row(name, f"{count[name]:,}", f"{size:,}", allowed.get(name, ""))
    sheet.add_section()
    sheet.add_row("all but weights", f"{len(found.files) - count['weights']:,}", f"{rest:,}",
                  f"{limits.reserve_bytes:,}")
    sheet.add_row("total", f"{len(found.files):,}", f"{found.total_bytes:,}", f"{limits.limit_bytes:,}")
    return sheet


def verdict(found: Survey, limits: Limits) -> list[str]:
    """Return what is wrong, a sentence each; nothing when the submission can be handed in."""
    wrong = [f"{name} {reason}" for name, reason in found.faults]
    over = found.total_bytes - limits.limit_bytes
    if over > 0:
        parts = ", ".join(f"{name} {size:,}" for name, size in found.by_component().items())
        wrong.append(
            f"{found.total_bytes:,} bytes are {over:,} over the limit of {limits.limit_bytes:,} ({parts})"
        )
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Weigh a submission; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.size", description="Weigh a submission.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "output")
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2",
                        help="whose limits hold (default: $PROFILE, else smollm2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    try:
        limits = load_profile(arguments.profile, ROOT / "profiles").limits
        found = survey(arguments.folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = verdict(found, limits)
    if arguments.json:
        report = {"bytes": found.by_component(), "total_bytes": found.total_bytes,
                  "limit_bytes": limits.limit_bytes, "reserve_bytes": limits.reserve_bytes, "wrong": wrong}
        print(json.dumps(report, sort_keys=True, indent=1))
    else:
        console().print(table(found, limits))
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
