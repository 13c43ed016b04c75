"""The runner that gives each stage a container: code and inputs to read, its folders to write, no more."""

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.upstream.pip import pip_environment
from stages.wrapper.engine import Container, Image
from stages.wrapper.runner import WORKER, Call, Host, see_to_its_end

# Made by stages; a stage sees of these only what it declares.
MADE = ("build", "logs", "output", "vendor", "wheels")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSIDE = Path("/opt/venv/bin/python")
# Files of this machine that reaching a network may take, by the variables that name them.
CERTIFICATES = ("PIP_CERT", "PIP_CLIENT_CERT", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
                "CURL_CA_BUNDLE")
FAILED_TO_START = (125, 126, 127)


@dataclass(frozen=True)
class Contained:
    """A container engine that answers, with the image for stages."""

    name: str
    image: Image

    def run(self, call: Call) -> int:
        """Execute a call in a container of its own, or on the host where it starts containers itself.

        Raises:
            UserError: the engine could not start it.
        """
        if call.conducts:
            return Host().run(call)
        given = dict(call.env) | (_pip_settings() if call.network else {})
        container = self._container(call, given)
        worker = (str(interpreter(self.image)), *WORKER, str(call.spec), "--contained")
        # The engine's client needs this machine's own surroundings; what the stage is given goes by name.
        child = subprocess.Popen(container.command(call.root, *worker), env=os.environ | given,
                                 cwd=call.root, stdin=subprocess.PIPE, start_new_session=True)
        try:
            code = see_to_its_end(child, container.kill)
        except BaseException:
            container.kill()
            raise
        finally:
            if child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        if code in FAILED_TO_START:
            raise UserError(f"{call.stage}: {self.name} could not start its container (its words are above); "
                            "RUNNER=host does without")
        return code

    def facts(self) -> dict[str, Any]:
        """Return the image: its digest above all."""
        return {"image": self.image.facts()}

    def _container(self, call: Call, given: dict[str, str]) -> Container:
        fixed = {"PATH": f"{interpreter(self.image).parent}:{SYSTEM_PATH}", "HOME": "/tmp", "TMPDIR": "/tmp",  # noqa: S108
                 "USER": "draftmill", "LOGNAME": "draftmill"} | surroundings(self.image)
        caches = [Path(value) for name, value in given.items() if name.endswith(("_CACHE_DIR", "HF_HOME"))]
        writes = (*call.writes, *{cache.parent for cache in caches})
        for folder in writes:
            folder.mkdir(parents=True, exist_ok=True)
        reads = (*_code(call.root), *call.reads, *environment_folders(self.image))
        if call.network or call.reach:
            named = (Path(given[name]) for name in CERTIFICATES if given.get(name))
            reads += tuple(path for path in named if path.exists())
        return Container(
            engine=self.name, image=self.image, name=f"draftmill-{call.stage}-{os.getpid()}",
            reads={path: path for path in reads if path not in writes},
            writes={path: path for path in writes},
            env=fixed, handed_on=[name for name in given if name not in {*fixed, "LD_LIBRARY_PATH"}],
            network="host" if call.network or call.reach else "none",
            gpus=bool(call.devices), workdir=call.root)


def interpreter(image: Image) -> Path:
    """Return the Python that runs a stage in an image."""
    return INSIDE if image.whole else Path(sys.executable)


def environment_folders(image: Image) -> tuple[Path, ...]:
    """Return the folders of this machine that a base image lacks: the running environment and its Python."""
    if image.whole:
        return ()
    # A distribution's Python lies in /usr, and so it is in the base image itself (docker/base).
    folders = [Path(sys.prefix), *([Path(sys.base_prefix)] if sys.base_prefix != "/usr" else [])]
    return tuple(dict.fromkeys(folders))


def surroundings(image: Image) -> dict[str, str]:
    """Return what a mounted Python needs in its environment: where its own library lies, if it is shared."""
    shared = not image.whole and sys.base_prefix != "/usr" and sysconfig.get_config_var("Py_ENABLE_SHARED")
    return {"LD_LIBRARY_PATH": f"{sys.base_prefix}/lib"} if shared else {}


def _pip_settings() -> dict[str, str]:
    """Return as variables what pip's files here say of its index: a container does not have the files."""
    ours = ("PIP_CONFIG_FILE", "PIP_CACHE_DIR")
    return {name: value for name, value in pip_environment().items()
            if name.startswith("PIP_") and name not in ours}


def _code(root: Path) -> Iterator[Path]:
    """Yield what lies at the top of the repository and was not made by stages."""
    for path in sorted(root.iterdir()):
        if path.name not in MADE and not path.name.startswith("."):
            yield path
