"""Container engines for the tests: real podman where it answers, and stand-ins that echo."""

import os
from pathlib import Path

import pytest

from stages.wrapper.engine import find_image, silence

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "podman"


def reason_against() -> str:
    """Why nothing can be run in podman here; nothing if it can."""
    reason = silence(ENGINE)
    if not reason and find_image(ROOT, ENGINE, "grader") is None:
        reason = f"{ENGINE} has no image of ours: make base-image"
    return reason


def podman_or_skip() -> str:
    """Return 'podman', or skip the test; in CI there must be one."""
    reason = reason_against()
    assert not (reason and os.environ.get("DRAFTMILL_NEEDS_ENGINE")), reason
    if reason:
        pytest.skip(reason)
    return ENGINE


def stand_in(folder: Path, name: str, info: str = "", image: str = "") -> None:
    """Write an engine's client.

    Args:
        folder: is to be put on PATH.
        name: docker or podman.
        info: what `info` says; nothing is a client without an engine.
        image: the JSON of the one image it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"""#!/bin/sh
case $1 in
    info) test -n '{info}' && echo '{info}' ;;
    image) test -n '{image}' && echo '[{image}]' ;;
    run) printf '%s\\n' "$@" ;;
    *) exit 9 ;;
esac
""")
    program.chmod(0o755)
