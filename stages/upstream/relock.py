"""Hub sources get their hashes: of large files as the hub states them, of small ones by hashing them here.

    python -m stages.upstream.relock ID...     writes the files of hub sources into lock/sources.toml
"""

import argparse
import fnmatch
import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoSibling

from stages.errors import UserError
from stages.files import sha256_file, write_atomic
from stages.upstream import hub
from stages.upstream.pinned import FILE, Source, find, parsed, read_sources

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Lock hub sources; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages.upstream.relock", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="+", metavar="ID", help="a hub source of lock/sources.toml")
    try:
        for name in parser.parse_args(argv).ids:
            print(lock_source(ROOT / FILE, name))
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    return 0


def lock_source(path: Path, name: str) -> str:
    """Write the files of one hub source into sources.toml, and return a line that says what was found.

    Raises:
        UserError: no such source, no hub source, the hub cannot be asked, a pattern matches nothing or a file
            that is for evaluation, or the hub's answer is for another commit. The file is as it was then.
    """
    source = find(read_sources(path), name)
    if source.kind != "hub":
        raise UserError(f"{FILE}: {name} is a package: pip's lock gives its hash, write it by hand")
    with hub.plain_https(), tempfile.TemporaryDirectory() as folder:
        files = [_entry(source, sibling, Path(folder)) for sibling in _listed(source)]
    text = with_files(path.read_text(encoding="utf-8"), name, files)
    if tomllib.loads(text)[name]["files"] != files:
        raise UserError(f"{FILE}: cannot write the files of {name}: keep its table in the form of the others")
    parsed(text)
    write_atomic(path, text)
    return f"{name}: {len(files)} files, {sum(int(file['size']) for file in files):,} bytes"


def with_files(text: str, name: str, files: list[dict[str, str | int]]) -> str:
    """Return the TOML text with `files` of one table replaced or added, and everything else as it was."""
    header = re.compile(rf'^\[(?:{re.escape(name)}|"{re.escape(name)}")\][ \t]*$', re.MULTILINE)
    start = header.search(text)
    if start is None:
        raise UserError(f"{FILE}: [{name}] has no line of its own")
    following = re.compile(r"^\[", re.MULTILINE).search(text, start.end())
    end = following.start() if following else len(text)
    table = re.sub(r"^files = \[\n(?:  .*\n)*\]\n", "", text[start.end() : end], flags=re.MULTILINE)
    # Comments and blank lines at the end belong to the table that follows.
    own = re.sub(r"(?:^[ \t]*(?:#.*)?\n)*\Z", "", table, flags=re.MULTILINE)
    rows = "".join(
        f"  {{ path = {json.dumps(file['path'])}, size = {file['size']}, "
        f"sha256 = {json.dumps(file['sha256'])} }},\n"
        for file in files
    )
    return f"{text[: start.end()]}{own.rstrip()}\nfiles = [\n{rows}]\n{table[len(own) :]}{text[end:]}"


def _listed(source: Source) -> list[RepoSibling]:
    """Return what the repository holds at the commit and `allow` lets through, by name."""
    endpoint = hub.access()
    info = hub.patiently(
        source.uri,
        lambda: HfApi(**endpoint).repo_info(
            source.name,
            repo_type=source.repo_type,
            revision=source.revision,
            files_metadata=True,
            timeout=hub.IDLE_S,
        ),
        failed=lambda fault: None,
    )
    if info.sha != source.revision:
        raise UserError(f"{source.uri}: the hub answers for commit {info.sha}")
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    chosen: set[str] = set()
    for pattern in source.allow:
        matching = fnmatch.filter(siblings, pattern)
        if not matching:
            raise UserError(
                f"{source.uri}: allow has {pattern!r}, which matches no file; the repository holds "
                f"{', '.join(sorted(siblings)[:20])}"
            )
        chosen.update(matching)
    return [siblings[name] for name in sorted(chosen)]


def _entry(source: Source, sibling: RepoSibling, folder: Path) -> dict[str, str | int]:
    name = sibling.rfilename
    if sibling.lfs is not None:
        return {"path": name, "size": sibling.lfs.size, "sha256": sibling.lfs.sha256}
    found = hub.patiently(
        f"{source.uri}/{name}",
        lambda: hub.download(source, name, folder, failed=lambda fault: None),
        failed=lambda fault: None,
    )
    return {"path": name, "size": found.stat().st_size, "sha256": sha256_file(found)}


if __name__ == "__main__":
    sys.exit(main())
