"""Which runner carries out stages: the one asked for, or the first engine that can, or the host."""

from pathlib import Path

from stages.errors import UserError
from stages.wrapper.containers import Contained
from stages.wrapper.engine import ENGINES, HOW_TO_MAKE, LOCKS, find_image, need_image, silence
from stages.wrapper.runner import Host, Runner

RUNNERS = (*ENGINES, "host", "system")


def choose_runner(root: Path, name: str) -> tuple[Runner, str]:
    """Return the runner of a name, and, where it had to be chosen (no name), a line that says why this one.

    An engine is chosen if it answers and has images for stages and for the grader's twin.

    Raises:
        UserError: there is none of that name, its engine does not answer, or it has no image.
    """
    if name in ENGINES:
        if reason := silence(name):
            raise UserError(f"RUNNER={name}: {reason}. Start or install it, or use RUNNER=host")
        for kind in LOCKS:
            need_image(root, name, kind)
        return _contained(root, name), ""
    if name:
        if name not in RUNNERS:
            raise UserError(f"RUNNER={name}: there is no such runner. Runners: {', '.join(RUNNERS)}")
        return Host(name), ""
    reasons: list[str] = []
    for engine in ENGINES:
        reason = silence(engine)
        if not reason and all(find_image(root, engine, kind) for kind in LOCKS):
            return _contained(root, engine), _line(f"stages run in {engine}", reasons)
        reasons.append(reason or f"{engine} has no image of ours yet: {HOW_TO_MAKE}")
    return Host(), _line("stages run on the host", reasons)


def _contained(root: Path, engine: str) -> Contained:
    return Contained(engine, need_image(root, engine, "build"))


def _line(fact: str, reasons: list[str]) -> str:
    return f"{fact} ({'; '.join(reasons)})" if reasons else fact
