"""One run of one stage: apart, beside its place, moved in when whole, its record written last."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import canonical_json, files_under, read_json, write_atomic
from stages.profile import Profile
from stages.wrapper.declaration import Declaration
from stages.wrapper.digests import Digests
from stages.wrapper.place import fresh_partial, move_in, remove
from stages.wrapper.record import make_record, record_path, write_record
from stages.wrapper.runner import Call, Runner, environment, threads

NETWORK_STAGE = "fetch"  # the only one that may meet a network
SIGNALLED = 128


class StageFailedError(Exception):
    """The stage's process ended with this code, and has said why."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Shop:
    """What running needs to know beside the stage itself."""

    root: Path
    profile: Profile
    runner: Runner
    declarations: dict[str, Declaration]
    digests: Digests

    def place(self, stage: str) -> Path:
        """Where a stage's outputs lie."""
        return self.declarations[stage].folder(self.root, self.profile.name)

    def work(self, stage: str, key: str) -> Path:
        """The folder of checkpoints that survives a kill, one for each key."""
        folder = Path(self.profile.checkpoints.folder).expanduser()
        place = self.own_work if folder == Path() else self.root / folder / self.profile.name
        return place / f"{stage}-{key[:16]}"

    @property
    def own_work(self) -> Path:
        """Where checkpoints go unless the profile says otherwise."""
        return self.root / "build" / self.profile.name / ".work"

    def servers(self, stage: str) -> dict[str, Any]:
        """What the profile says of the servers that a stage may reach; nothing for one that reaches none."""
        section = self.declarations[stage].reaches
        return dict(self.profile.model_dump(mode="json")[section]) if section else {}

    def log(self, stage: str) -> Path:
        """The stage's log."""
        return self.root / "logs" / self.profile.name / f"{stage}.log"


def execute(shop: Shop, stage: str, definition: dict[str, Any], key: str) -> dict[str, Any]:
    """Run a stage, move its outputs in, write its record, and return the facts of the run.

    A kill at any moment leaves either the old record or none, and checkpoints under the key.

    Raises:
        StageFailedError: its process failed or was stopped.
        UserError: it left something that cannot be recorded.
    """
    declaration, place, work = shop.declarations[stage], shop.place(stage), shop.work(stage, key)
    for folder in (work, place.parent, shop.log(stage).parent, *([place] if declaration.in_place else [])):
        folder.mkdir(parents=True, exist_ok=True)
    out = place if declaration.in_place else fresh_partial(place)
    started = time.time()
    result = _work_apart(shop, declaration, definition, key, out)
    outputs = {name: _digest(stage, out / name, shop.digests) for name in _names(declaration, out, result)}
    facts = _facts(shop, stage, started) | result
    record = make_record(definition, outputs, facts)
    # From here until the record is written a kill leaves no record at all, and so the stage runs again.
    record_path(shop.root, shop.profile.name, stage).unlink(missing_ok=True)
    if not declaration.in_place:
        move_in(out, place)
    write_record(shop.root, shop.profile.name, record)
    _sweep(shop, stage, work)
    return facts


def _sweep(shop: Shop, stage: str, work: Path) -> None:
    """Remove what the stage went on from; a disk that checkouts share may hold what others go on from."""
    remove(work)
    if work.parent == shop.own_work:
        for folder in work.parent.glob(f"{stage}-*"):
            remove(folder)


def _work_apart(shop: Shop, declaration: Declaration, definition: dict[str, Any], key: str,
                out: Path) -> dict[str, Any]:
    """Have the runner carry out the stage function, and return what it reported."""
    stage, log, work = declaration.stage, shop.log(declaration.stage), shop.work(declaration.stage, key)
    spec_path, result_path = (work.with_name(f"{work.name}.{kind}.json") for kind in ("spec", "result"))
    inputs = {name: shop.place(name) for name in declaration.upstream}
    network, servers = stage == NETWORK_STAGE, shop.servers(stage)
    reach = tuple(servers.get("addresses", ()))
    devices = int(shop.profile.device == "cuda" and "torch" in declaration.libraries)
    writes = (out, work.parent, log.parent)
    spec = {name: definition[name] for name in ("stage", "config", "seed", "device")}
    if declaration.reaches:
        spec["config"] = spec["config"] | {declaration.reaches: servers}
    spec |= {"inputs": {name: str(folder) for name, folder in inputs.items()}, "out": str(out),
             "work": str(work), "root": str(shop.root), "log": str(log), "result": str(result_path),
             "key": key, "devices": devices, "runner": shop.runner.name, "network": network, "reach": reach,
             "checkpoint_s": 60 * shop.profile.checkpoints.minutes,
             "writes": [str(folder) for folder in writes]}
    write_atomic(spec_path, canonical_json(spec))
    result_path.unlink(missing_ok=True)
    code = shop.runner.run(Call(
        stage=stage, spec=spec_path, env=environment(shop.root, network, reach), root=shop.root,
        reads=tuple(inputs.values()), writes=writes, network=network, reach=reach,
        devices=devices, conducts=declaration.conducts))
    if code > SIGNALLED:
        print(f"draftmill: {stage}: stopped (exit code {code}); the same command goes on from where it was",
              file=sys.stderr)
    if code:
        raise StageFailedError(code)
    result: dict[str, Any] = read_json(result_path)
    for path in (spec_path, result_path):
        path.unlink()
    return result


def _names(declaration: Declaration, out: Path, result: dict[str, Any]) -> list[str]:
    if not declaration.in_place:
        return files_under(out)
    names = result["metrics"].pop("subjects", None)
    if not isinstance(names, list):
        raise UserError(f"stages/{declaration.stage}.py: in place, so it returns 'subjects', its files")
    return [str(name) for name in names]


def _digest(stage: str, path: Path, digests: Digests) -> str:
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{stage}: left {path.name}, which is not a regular file")
    return digests.of(path)


def _facts(shop: Shop, stage: str, started: float) -> dict[str, Any]:
    finished, reach = time.time(), shop.servers(stage).get("addresses")
    return ({"reached": reach} if reach else {}) | {
        "profile": shop.profile.name, "runner": shop.runner.name, **shop.runner.facts(),
        "cpu": _first("/proc/cpuinfo", "model name"), "threads": threads(),
        "driver": _first("/proc/driver/nvidia/version", "NVRM version"),
        "started": _utc(started), "finished": _utc(finished), "seconds": round(finished - started, 1),
        "log": shop.log(stage).relative_to(shop.root).as_posix(),
    }


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _first(path: str, label: str) -> str | None:
    """Return what stands behind `label:` in one of the kernel's tables."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(label)), None)
