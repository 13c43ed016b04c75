"""The rehearsal in the grader's twin: the server alone in one container, the client in another beside it.

Both share one network without an outside. The client's container holds it, so that a server may come and go.
The conductor, on the host, starts and stops both and looks at the files.
"""

import json
import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.files import write_atomic, write_json
from stages.rehearsal import isolation, venv
from stages.rehearsal.scenes import ASKING, ENDED, ROOT, STARTED, Plan, changed, hand_over, plain, snapshot
from stages.rehearsal.server import CONTRACT, HANDED_ON, POLL_S, Server
from stages.wrapper.containers import SYSTEM_PATH, environment_folders, interpreter, surroundings
from stages.wrapper.engine import Container, Image, need_image
from stages.wrapper.runner import FIXED, OFFLINE

USER = 12345
SUBMISSION = "/submission"
GRADERS_SYSTEM = "Ubuntu 24.04"
HANDED_TO_CLIENT = ("drafter", "stages", "docker", "lock", "profiles")


@dataclass(frozen=True)
class Twin:
    """The containers of one rehearsal.

    Attributes:
        engine: docker or podman.
        image: what the server runs in.
        asker: what the client runs in, the image for stages.
        gpus: whether the server has this machine's GPU.
    """

    engine: str
    image: Image
    asker: Image
    gpus: bool

    @classmethod
    def find(cls, root: Path, engine: str, gpus: bool) -> "Twin":
        """Find the images.

        Raises:
            UserError: one is not there.
        """
        return cls(engine, need_image(root, engine, "grader"), need_image(root, engine, "build"), gpus)

    def environment(self) -> dict[str, str]:
        """Return how true the rehearsal is, for its report."""
        other = "" if GRADERS_SYSTEM in self.image.system else f", where the grader has {GRADERS_SYSTEM}"
        facts = self.image.facts()
        return {
            "network": "none",
            "user": f"{_user() or 'the same user, not root'}, without capabilities",
            "twin": f"{self.engine}, {facts['name']} {facts['digest']}: {facts['system']}{other}; "
                    f"Python: {facts['environment']}",
        }


def rehearse_in_twin(plan: Plan, twin: Twin) -> dict[str, Any]:
    """Rehearse in containers; return what `scenes.rehearse` returns.

    Raises:
        UserError: an image is not there, or the environment does not answer to the lock.
        RuntimeError: the client's container failed.
    """
    answer = plan.scratch / "asked" / "result.json"
    answer.parent.mkdir()
    write_json(answer.parent / "plan.json", plain(plan))
    client, server = _client(plan, twin, answer), _server(plan, twin)
    _prepare(plan, twin)
    before = snapshot(plan.submission)
    module = ("-m", "stages.rehearsal.scenes", str(answer.parent / "plan.json"), str(answer), "--twin")
    asking = subprocess.Popen(_mortal(client.command(ROOT, str(interpreter(twin.asker)), *module)),
                              stdin=subprocess.DEVNULL, start_new_session=True)
    with ExitStack() as stack:
        stack.callback(asking.wait)
        stack.callback(client.kill)
        while not (answer.parent / ASKING).exists():
            _check(asking)
            time.sleep(POLL_S)
        (answer.parent / STARTED).touch()
        command = server.command(ROOT, "bash", f"{SUBMISSION}/serve.sh")
        running = stack.enter_context(
            Server(_mortal(command), plan.scratch / "server.log", dict(os.environ), server.kill))
        while not answer.exists():
            _check(asking)
            if (how := running.ended()) and not (answer.parent / ENDED).exists():
                write_atomic(answer.parent / ENDED, how)
            time.sleep(POLL_S)
        seen: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        seen["stop"] = running.stop(plan.stop_timeout_s)
    seen["changed"] = changed(before, snapshot(plan.submission))
    seen["log_tail"] = running.log_tail()
    return seen | {"environment": twin.environment()}


def _prepare(plan: Plan, twin: Twin) -> None:
    """Lay out what the server writes, and let it belong to its user."""
    if not twin.image.whole:
        venv.lay_out(plan.scratch / "venv", ROOT)
    if not os.getuid():
        hand_over(USER, plan.submission, *([] if twin.image.whole else [plan.scratch / "venv"]))


def _client(plan: Plan, twin: Twin, answer: Path) -> Container:
    reads = (*(ROOT / name for name in HANDED_TO_CLIENT), *(path for _, path in plan.sets),
             *environment_folders(twin.asker))
    own = {"PATH": f"{interpreter(twin.asker).parent}:{SYSTEM_PATH}", "HOME": "/tmp"}  # noqa: S108
    return Container(
        twin.engine, twin.asker, f"draftmill-client-{os.getpid()}", reads={path: path for path in reads},
        writes={answer.parent: answer.parent}, env=own | FIXED | OFFLINE | surroundings(twin.asker),
        workdir=ROOT)


def _server(plan: Plan, twin: Twin) -> Container:
    whole = twin.image.whole
    writes: dict[Path, str] = {plan.submission: SUBMISSION}
    if not whole:
        writes[plan.scratch / "venv"] = venv.AT
    given = CONTRACT | {"PATH": f"{venv.AT}/bin:{SYSTEM_PATH}", "HOME": "/nonexistent", "LANG": "C.UTF-8"}
    given |= {} if whole else venv.variables()
    return Container(
        twin.engine, twin.image, f"draftmill-twin-{os.getpid()}", reads={} if whole else dict(venv.mounts()),
        writes=dict(writes), env=given, handed_on=[name for name in HANDED_ON if name in os.environ],
        network=f"container:draftmill-client-{os.getpid()}", user=_user(), gpus=twin.gpus, own_root=whole)


def _user() -> str:
    """Return the server's user: one of its own where root may say so, else who calls."""
    return "" if os.getuid() else f"{USER}:{USER}"


def _mortal(command: list[str]) -> list[str]:
    """Return a command that is told to stop when this process dies."""
    return isolation.command(command=command)


def _check(client: "subprocess.Popen[bytes]") -> None:
    if client.poll() is not None:
        raise RuntimeError(f"the rehearsal's client ended with code {client.returncode}; its words are above")
