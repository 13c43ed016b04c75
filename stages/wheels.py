"""Make the wheelhouse that the grader installs from, and prove it complete without a network."""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stages.errors import UserError
from stages.files import write_atomic, write_json
from stages.job import Job
from stages.upstream import grader
from stages.upstream.grader import shipped
from stages.upstream.pins import read_inputs, read_pins
from stages.upstream.pip import pip_environment, reason, run_pip
from stages.upstream.wheelhouse import Wheel, check_closure, matched, sbom

SECTIONS = ()
TAKES = ("fetch/wheels/*",)
FILES = ("lock/serve.in", "lock/serve.txt")
PLACE = "wheels"

# What the server imports of a distribution in lock/serve.in, where it is not the same name with underscores.
MODULES = {"backports-zstd": "backports.zstd"}


def run(job: Job) -> dict[str, object]:
    """Check vendor/wheels/ against lock/serve.txt and the grader, copy it, and prove it complete.

    Raises:
        UserError: any wheel is not what it should be, or the whole is not complete; the text names the wheel.
    """
    pins = shipped(read_pins(job.root / "lock/serve.txt"))
    source = job.inputs["fetch"] / "wheels"
    wheels = matched(source, pins)
    check_closure(wheels)
    for wheel in wheels:
        shutil.copyfile(wheel.path, job.out / wheel.path.name)
        (job.out / wheel.path.name).chmod(0o644)
    write_atomic(
        job.out / "requirements.txt",
        "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels),
    )
    write_json(job.out / "sbom.json", sbom(wheels))
    asked = [canonicalize_name(requirement.name) for requirement in read_inputs(job.root / "lock/serve.in")]
    job.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.work) as folder:
        prove_install(job.out, Path(folder) / "site", wheels)
        prove_imports(
            Path(folder) / "site",
            Path(folder) / "grader",
            wheels,
            [MODULES.get(name, name.replace("-", "_")) for name in asked],
        )
    total = sum(wheel.size for wheel in wheels)
    job.say(f"{len(wheels)} wheels, {total:,} bytes: installed and imported without a network")
    return {"wheels": len(wheels), "bytes": total, "omitted": sorted(grader.OMITTED)}


def prove_install(wheelhouse: Path, site: Path, wheels: list[Wheel]) -> None:
    """Install the wheelhouse into an empty folder with no index, and compare what came with what should.

    Raises:
        UserError: pip refuses, or something is missing or extra afterwards.
    """
    done = run_pip(
        [
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-cache-dir",
            "--no-deps",
            "--no-compile",
            f"--find-links={wheelhouse}",
            "--only-binary=:all:",
            "--require-hashes",
            f"--requirement={wheelhouse / 'requirements.txt'}",
            f"--target={site}",
        ],
        pip_environment() | {"PIP_NO_INDEX": "1"},
    )
    if done.returncode:
        raise UserError(f"the wheelhouse does not install offline: {reason(done)}")
    found = {
        canonicalize_name(one.name): one.version for one in importlib.metadata.distributions(path=[str(site)])
    }
    wanted = {wheel.name: wheel.version for wheel in wheels}
    if found != wanted:
        odd = sorted(set(found.items()) ^ set(wanted.items()))
        raise UserError(f"the wheelhouse installs otherwise than it should: {odd}")


def prove_imports(site: Path, lent: Path, wheels: list[Wheel], modules: list[str]) -> None:
    """Import modules in a Python that sees the standard library, the installed wheels and the grader's few.

    Args:
        site: where the wheels are installed.
        lent: a folder to fill with those of the grader's distributions that the wheels ask for.
        wheels: the wheelhouse.
        modules: what to import.

    Raises:
        UserError: an import fails; the text has its last line.
    """
    lent.mkdir()
    for name in sorted(_leaned_on(wheels)):
        _lend(name, lent)
    program = (
        "import importlib, sys\n"
        "sys.path += sys.argv[1:3]\n"
        "for module in sys.argv[3:]: importlib.import_module(module)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program, str(site), str(lent), *modules],
        capture_output=True,
        text=True,
        check=False,
        env={},
        cwd=site,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise UserError(f"the wheelhouse does not import as it should: {last}")


def _leaned_on(wheels: list[Wheel]) -> set[str]:
    """Return the names of the grader's distributions that a wheel asks for, torch's kind excepted."""
    asked = {canonicalize_name(Requirement(line).name) for wheel in wheels for line in wheel.requires}
    return {
        name for name in asked if name in ("setuptools", "typing-extensions") and name in grader.PREINSTALLED
    }


def _lend(name: str, folder: Path) -> None:
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"{name} is not installed here: make the environment from lock/build.txt") from error
    for file in files:
        if ".." not in file.parts and file.suffix != ".pyc":
            place = folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(str(file.locate())), place)
