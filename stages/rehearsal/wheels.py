"""The wheels of a submission: unmodified, and such that the grader's Python takes them."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from stages.errors import UserError
from stages.size import Survey
from stages.upstream import grader
from stages.upstream.pins import Pin
from stages.upstream.wheelhouse import read_wheel, runs

FOLDER = "wheels"
LISTS = ("requirements.txt", "sbom.json")


def wheel_faults(found: Survey, pins: Mapping[str, Pin]) -> Iterator[str]:
    """Yield what is wrong, a sentence each.

    Args:
        found: the submission.
        pins: the serving lock, whose hashes are those that PyPI gave.
    """
    for file in found.files:
        path = PurePosixPath(file.name)
        if path.suffix != ".whl" and (path.parts[0] != FOLDER or path.name in LISTS):
            continue
        try:
            wheel = read_wheel(file.path)
        except UserError as error:
            yield str(error)
            continue
        pin = pins.get(wheel.name)
        if not runs(wheel):
            yield (f"{path.name} does not run on the grader, which takes cp312, abi3 and py3 wheels for "
                   f"manylinux up to glibc 2.{grader.GLIBC_MINOR} on x86-64")
        elif pin is None or wheel.version != pin.version:
            yield f"{path.name} is of no version that lock/serve.txt pins"
        elif wheel.sha256 not in pin.hashes:
            yield (f"{path.name} was modified: its sha256 {wheel.sha256[:16]}... is none of those that "
                   f"lock/serve.txt has for {pin.name}=={pin.version}")
