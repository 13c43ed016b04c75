"""`make lock`: lock/*.in to hashed lock/*.txt by pip-compile; and the check that they still answer."""

import argparse
import hashlib
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from stages.errors import UserError
from stages.files import write_atomic
from stages.upstream.pins import Pin, read_inputs, read_pins
from stages.upstream.pip import reason, run_pip

ROOT = Path(__file__).resolve().parent.parent

# Each lock with the inputs that it answers to. `build` comes first: the others take its versions.
INPUTS = {"build": ("build.in", "serve.in"), "serve": ("serve.in",), "dev": ("dev.in",),
          "grader": ("grader.in",)}
OPTIONS = (
    "--generate-hashes",
    "--allow-unsafe",
    "--strip-extras",
    "--no-emit-options",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-emit-trusted-host",
    "--no-header",
    "--no-config",
    "--newline=lf",
    "--quiet",
    "--resolver=backtracking",
    "--pip-args=--only-binary=:all:",
)
PLACES = re.compile(
    r"://|file:/|--(find-links|(extra-)?index-url|trusted-host)|(^|[\s\"'@])/\w", re.MULTILINE
)


def header(folder: Path, name: str) -> str:
    """Return the first line of a lock: the digest of the inputs that it answers to, comments apart."""
    digest = hashlib.sha256()
    for file in INPUTS[name]:
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
        asked = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        digest.update("\n".join([file, *asked, ""]).encode())
    inputs = ", ".join(f"lock/{file}" for file in INPUTS[name])
    return (
        f"# Answers to {inputs}, sha256 {digest.hexdigest()}. "
        "Written by `make lock` for Python 3.12 on Linux x86-64.\n"
    )


def check(folder: Path, name: str) -> dict[str, Pin]:
    """Return a lock's pins if it answers to its inputs.

    Raises:
        UserError: the inputs changed since, a requirement is not met by a pin, a pin has no hash, a path or
            host is named, or a package also pinned in build has another version there; the text says which.
    """
    path = folder / f"{name}.txt"
    pins = read_pins(path)
    text = path.read_text(encoding="utf-8")
    if not text.startswith(header(folder, name)):
        raise UserError(f"lock/{name}.txt no longer answers to its input: run `make lock`")
    if place := PLACES.search(text):
        line = text[: place.start()].count("\n") + 1
        raise UserError(f"lock/{name}.txt, line {line}: names a path or a host; run `make lock`")
    for requirement in read_inputs(folder / INPUTS[name][0]):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin.version, prereleases=True):
            raise UserError(f"lock/{name}.txt does not meet {requirement}: run `make lock`")
    if name != "build":
        _agree(name, pins, read_pins(folder / "build.txt"))
    return pins


def compile_lock(folder: Path, name: str, upgrade: bool = False) -> None:
    """Write one lock from its inputs; pins that still fit are kept unless `upgrade`. Atomic.

    Raises:
        UserError: pip-compile found no answer, or the answer fails `check`.
    """
    path = folder / f"{name}.txt"
    with tempfile.TemporaryDirectory() as temporary:
        # On copies: pip-compile keeps the pins that it finds in its output, and a kill leaves our lock whole.
        copy = Path(temporary) / "lock"
        copy.mkdir()
        for file in [*INPUTS[name], "build.txt", f"{name}.txt"]:
            if (folder / file).is_file():
                (copy / file).write_bytes((folder / file).read_bytes())
        constraint = [] if name == "build" else ["--constraint=lock/build.txt"]
        done = run_pip(
            [
                "piptools",
                "compile",
                *OPTIONS,
                *constraint,
                *(["--upgrade"] if upgrade else []),
                f"--output-file=lock/{name}.txt",
                f"lock/{INPUTS[name][0]}",
            ],
            cwd=Path(temporary),
        )
        if done.returncode:
            raise UserError(f"lock/{name}.txt: pip-compile failed: {reason(done)}")
        text = (copy / f"{name}.txt").read_text(encoding="utf-8")
        body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# Answers to"))
        (copy / f"{name}.txt").write_text(header(copy, name) + body, encoding="utf-8")
        check(copy, name)
        write_atomic(path, (copy / f"{name}.txt").read_bytes())


def main(argv: Sequence[str]) -> int:
    """Write the locks named, or all."""
    parser = argparse.ArgumentParser(prog="python -m stages.lock", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="LOCK", help=f"of {', '.join(INPUTS)}; all if none is named"
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions that the inputs allow"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that the locks answer to their inputs"
    )
    options = parser.parse_args(argv)
    try:
        if unknown := set(options.names) - set(INPUTS):
            raise UserError(f"there is no lock {', '.join(sorted(unknown))}; locks: {', '.join(INPUTS)}")
        if not options.check and (
            sys.version_info[:2] != (3, 12) or platform.machine() != "x86_64" or sys.platform != "linux"
        ):
            raise UserError("the locks are for Python 3.12 on Linux x86-64: run `make lock` there")
        for name in [known for known in INPUTS if known in (options.names or INPUTS)]:
            if not options.check:
                compile_lock(ROOT / "lock", name, options.upgrade)
            print(f"lock/{name}.txt: {len(check(ROOT / 'lock', name))} pins")
    except UserError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 2
    return 0


def _agree(name: str, pins: dict[str, Pin], build: dict[str, Pin]) -> None:
    for pin in pins.values():
        other = build.get(pin.name)
        if other and other.version != pin.version:
            raise UserError(
                f"lock/{name}.txt pins {pin.name}=={pin.version}, lock/build.txt {other.version}: "
                "run `make lock`"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
