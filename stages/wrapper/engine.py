"""Container engines that really answer, the images that they hold, and the command line of docker/run."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.errors import UserError

ENGINES = ("docker", "podman")
# What an engine says only if it is there and not merely its client.
ANSWERS = {"docker": "{{.ServerVersion}}", "podman": "{{.Version.Version}}"}
ANSWER_TIMEOUT_S = 20.0
BASE = "base"
LOCKS = {"build": "lock/build.txt", "grader": "lock/grader.txt"}
LABEL = "org.draftmill"
HOW_TO_MAKE = ("make images, or, where no image registry can be reached, make base-image (which needs root "
               "and debootstrap)")


@dataclass(frozen=True)
class Image:
    """An image of ours in an engine's store.

    Attributes:
        name: what it is called there.
        digest: 'sha256:' and the digest of its configuration, which holds the time of its making.
        layers: the digests of its layers: the same for the same files.
        kind: 'build' or 'grader', whole, or 'base', into which Python and .venv are mounted.
        system: the distribution in it.
    """

    name: str
    digest: str
    layers: tuple[str, ...]
    kind: str
    system: str

    @property
    def whole(self) -> bool:
        """Whether Python and its libraries are inside."""
        return self.kind != BASE

    def facts(self) -> dict[str, Any]:
        """Return what a record says of it."""
        inside = "in the image" if self.whole else "Python 3.12 and .venv of the host, mounted read-only"
        return {"name": self.name, "digest": self.digest, "layers": list(self.layers), "system": self.system,
                "environment": inside}


def silence(engine: str) -> str:
    """Return why an engine does not count, or nothing if it answers."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    command = [engine, "info", "--format", ANSWERS[engine]]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return f"{engine} does not answer"
    if asked.returncode or not asked.stdout.strip():
        return f"{engine} is installed, but no engine answers it"
    return ""


def find_image(root: Path, engine: str, kind: str) -> Image | None:
    """Return the image for a kind of container: the whole one if it is of today's lock, else the base."""
    for name, wanted in ((kind, lock_digest(root, kind)), (BASE, None)):
        image = f"localhost/draftmill-{name}:latest"
        found = _inspect(engine, image)
        labels = (found.get("Config") or {}).get("Labels") or {}
        if labels.get(f"{LABEL}.image") == name and labels.get(f"{LABEL}.locked") == wanted:
            digest = f"sha256:{found['Id'].removeprefix('sha256:')}"
            layers = tuple((found.get("RootFS") or {}).get("Layers") or ())
            return Image(image, digest, layers, name, labels.get(f"{LABEL}.system", "unknown"))
    return None


def need_image(root: Path, engine: str, kind: str) -> Image:
    """Return the image for a kind of container.

    Raises:
        UserError: there is none; the text says how to make one.
    """
    image = find_image(root, engine, kind)
    if image is None:
        raise UserError(f"{engine} answers, but has no image of this checkout's {LOCKS[kind]}: {HOW_TO_MAKE}")
    return image


def lock_digest(root: Path, kind: str) -> str:
    """Return what an image of a kind is labelled with: the digest of its Dockerfile and its lock."""
    digest = hashlib.sha256()
    for name in (f"docker/{kind}.Dockerfile", LOCKS[kind]):
        path = root / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def _inspect(engine: str, image: str) -> dict[str, Any]:
    command = [engine, "image", "inspect", image]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        return {}
    described: list[dict[str, Any]] = json.loads(found.stdout)
    return described[0]


@dataclass(frozen=True)
class Container:
    """One container to be: what it sees, as docker/run takes it.

    Attributes:
        reads, writes: paths of this machine -> where they are seen.
        env: variables with their values, for all to see in the process list.
        handed_on: names of variables whose values come from the engine's client.
        network: none, host or container:NAME.
        user: UID:GID, or nothing for the caller.
        own_root: leave the image's own files writable to whom they belong.
        workdir: the folder to start in.
    """

    engine: str
    image: Image
    name: str
    reads: Mapping[Path, Path | str] = field(default_factory=dict)
    writes: Mapping[Path, Path | str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    handed_on: Iterable[str] = ()
    network: str = "none"
    user: str = ""
    gpus: bool = False
    own_root: bool = False
    workdir: Path | str = "/"

    def command(self, root: Path, *command: str) -> list[str]:
        """Return the whole command line that runs a command in it."""
        options = ["--name", self.name, "--network", self.network, "--workdir", str(self.workdir)]
        options += [part for path, at in self.reads.items() for part in ("--read", _mount(path, at))]
        options += [part for path, at in self.writes.items() for part in ("--write", _mount(path, at))]
        options += [part for name, value in self.env.items() for part in ("--env", f"{name}={value}")]
        options += [part for name in self.handed_on for part in ("--env", name)]
        options += ["--user", self.user] if self.user else []
        options += [*["--gpus"] * self.gpus, *["--own-root"] * self.own_root]
        return [str(root / "docker" / "run"), self.engine, *options, self.image.name, *command]

    def kill(self) -> None:
        """End it at once, if it still runs."""
        command = [self.engine, "kill", "--signal", "KILL", self.name]
        subprocess.run(command, capture_output=True, check=False)


def _mount(path: Path, at: Path | str) -> str:
    return f"{path.resolve()}={at}"
