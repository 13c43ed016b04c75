"""File digests, remembered by size, times and inode so that an idle `make` stays quick."""

import json
import time
from pathlib import Path

from stages.files import files_under, sha256_file, write_atomic

SETTLED_NS = 2_000_000_000  # a file changed this shortly before hashing may change again with the same times


class Digests:
    """The digests of a repository's files; `remember=False` reads every byte anew."""

    def __init__(self, root: Path, remember: bool = True) -> None:
        self.root = root
        self.path = root / "build" / ".digests.json"
        self.known: dict[str, list[int | str]] = self._load() if remember else {}
        self.changed = False

    def of(self, path: Path) -> str:
        """Return the sha256 of a regular file.

        Raises:
            OSError: it is not there or cannot be read.
        """
        state = path.stat()
        seen: list[int | str] = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        name = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        entry = self.known.get(name)
        if entry is not None and entry[:-1] == seen:
            return str(entry[-1])
        now = time.time_ns()
        digest = sha256_file(path)
        if max(state.st_mtime_ns, state.st_ctime_ns) < now - SETTLED_NS:
            self.known[name] = [*seen, digest]
            self.changed = True
        return digest

    def save(self) -> None:
        """Write down what was learnt, if anything; digests of files that are gone are dropped."""
        if self.changed:
            kept = {name: entry for name, entry in self.known.items() if (self.root / name).is_file()}
            write_atomic(self.path, json.dumps(kept, sort_keys=True))
            self.changed = False

    def _load(self) -> dict[str, list[int | str]]:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            return {name: entry for name, entry in known.items() if len(entry) == 5}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


def differences(folder: Path, expected: dict[str, str], digests: Digests, exact: bool) -> list[str]:
    """Compare a folder with its subjects; return a sentence for each file that is not as recorded.

    Args:
        folder: where the subjects lie.
        expected: subject name -> sha256.
        digests: where digests come from.
        exact: files that no subject names are faults too (false where several stages share the folder).
    """
    shown = folder.relative_to(digests.root) if folder.is_relative_to(digests.root) else folder
    faults = []
    for name, digest in expected.items():
        path = folder / name
        if path.is_symlink():
            faults.append(f"{shown / name} is a link, not the recorded file")
        elif not path.is_file():
            faults.append(f"{shown / name} is missing")
        elif digests.of(path) != digest:
            faults.append(f"{shown / name} differs from its record")
    if exact:
        faults += [f"{shown / name} is in no record" for name in files_under(folder) if name not in expected]
    return faults
