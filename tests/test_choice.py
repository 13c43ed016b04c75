"""Where stages run when nobody says, and what is said when they cannot run where they should."""

import json
import os
from pathlib import Path

import pytest
from engines import ROOT, stand_in
from workshop import Workshop

from stages.errors import UserError
from stages.wrapper.choice import choose_runner
from stages.wrapper.containers import Contained
from stages.wrapper.engine import lock_digest


def image(kind: str, locked: str | None = None) -> str:
    labels = {"org.draftmill.image": kind, "org.draftmill.system": "Ubuntu 24.04"}
    if locked:
        labels["org.draftmill.locked"] = locked
    return json.dumps({"Id": "sha256:" + "ab" * 32, "RootFS": {"Layers": ["sha256:cd"]},
                       "Config": {"Labels": labels}})


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of the system's programs, less any real engine, behind a folder for stand-ins."""
    system = tmp_path / "system"
    system.mkdir()
    for name in ("sh", "bash", "env", "test", "printf", "echo", "id"):
        found = next(Path(folder, name) for folder in ("/usr/bin", "/bin") if Path(folder, name).exists())
        (system / name).symlink_to(found)
    folder = tmp_path / "engines"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{system}")
    return folder


def test_without_any_engine_it_is_the_host_and_one_line_says_why(engines: Path):
    runner, why = choose_runner(ROOT, "")
    assert runner.name == "host"
    assert why == "stages run on the host (docker is not installed; podman is not installed)"


def test_a_client_without_an_engine_does_not_count(engines: Path):
    stand_in(engines, "docker")
    stand_in(engines, "podman", info="4.3.1", image=image("base"))
    runner, why = choose_runner(ROOT, "")
    assert isinstance(runner, Contained)
    assert (runner.name, runner.image.kind, runner.image.digest) == ("podman", "base", "sha256:" + "ab" * 32)
    assert runner.facts()["image"]["layers"] == ["sha256:cd"]
    assert why == "stages run in podman (docker is installed, but no engine answers it)"


def test_docker_goes_first_where_it_answers(engines: Path):
    for name in ("docker", "podman"):
        stand_in(engines, name, info="28", image=image("base"))
    runner, why = choose_runner(ROOT, "")
    assert (runner.name, why) == ("docker", "stages run in docker")


def test_an_engine_without_an_image_leaves_the_newcomer_on_the_host(engines: Path):
    stand_in(engines, "docker", info="28")
    runner, why = choose_runner(ROOT, "")
    assert runner.name == "host"
    assert "docker has no image of ours yet: make images, or, where no image registry" in why


def test_a_whole_image_counts_only_while_it_is_of_the_lock(engines: Path):
    stand_in(engines, "docker", info="28", image=image("build", lock_digest(ROOT, "build")))
    with pytest.raises(UserError, match=r"no image of this checkout's lock/grader.txt: make images"):
        choose_runner(ROOT, "docker")
    stand_in(engines, "docker", info="28", image=image("build", "another lock"))
    with pytest.raises(UserError, match=r"no image of this checkout's lock/build.txt: make images"):
        choose_runner(ROOT, "docker")


@pytest.mark.parametrize("name", ["host", "system"])
def test_who_asks_for_no_container_gets_none(engines: Path, name: str):
    stand_in(engines, "docker", info="28", image=image("base"))
    runner, why = choose_runner(ROOT, name)
    assert (runner.name, why) == (name, "")


def test_make_all_says_it_and_a_forced_engine_that_is_not_there_stops(engines: Path, tmp_path: Path):
    stand_in(engines, "docker")
    shop = Workshop(tmp_path / "shop")
    said = shop.run("all", RUNNER="docker", code=2)
    assert said.strip() == ("draftmill: RUNNER=docker: docker is installed, but no engine answers it. "
                            "Start or install it, or use RUNNER=host")
    assert shop.ran() == []
    said = shop.run("all", RUNNER="")
    reasons = "(docker is installed, but no engine answers it; podman is not installed)"
    assert said.splitlines()[1] == f"draftmill: stages run on the host {reasons}"
    assert shop.ran() == ["fetch", "data", "distill", "pack"]
