"""What is in docker/: pinned starting points, rules for Dockerfiles, and the flags of docker/run."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ROOT, podman_or_skip, stand_in

from stages.upstream.grader import PREINSTALLED
from stages.upstream.pins import read_pins

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PINNED = re.compile(r"^FROM (?P<reference>\S+:\S+)@(?P<digest>sha256:[0-9a-f]{64})$")
GOOD = (ROOT / "docker" / "grader.Dockerfile").read_text()


def faults(text: str, images: dict) -> list[str]:
    """What is wrong with a Dockerfile, in hadolint's spirit: a sentence each."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    found = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            pin = PINNED.match(line)
            known = {image["reference"]: image["digest"] for image in images.values()}
            if pin is None:
                found.append(f"{line}: no digest")
            elif known.get(pin["reference"]) != pin["digest"]:
                found.append(f"{line}: not what lock/images.toml pins")
        if word == "RUN" and "apt-get install" in rest and not (
                "--no-install-recommends" in rest and rest.endswith("rm -rf /var/lib/apt/lists/*")):
            found.append("apt-get install: with recommended packages, or the lists are left")
        if word == "RUN" and "pip install" in rest and not (
                "--require-hashes" in rest and "--no-cache-dir" in rest):
            found.append("pip install: without hashes, or with its cache")
        if word == "ADD" or (word == "RUN" and re.search(r"\b(curl|wget|sudo)\b", rest)):
            found.append(f"{line}: brings in what nothing pins")
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    if not users or users[-1].startswith(("0", "root")):
        found.append("the last USER is root")
    return found


def images() -> dict:
    return tomllib.loads((ROOT / "lock" / "images.toml").read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_starts_from_a_pinned_digest_and_keeps_the_rules(path: Path):
    assert faults(path.read_text(), images()) == []


def test_every_pinned_image_is_for_linux_amd64_and_starts_something():
    used = {PINNED.match(line)["reference"] for path in DOCKERFILES for line in path.read_text().splitlines()
            if line.startswith("FROM ")}
    assert used == {image["reference"] for image in images().values()}
    assert {image["platform"] for image in images().values()} == {"linux/amd64"}


@pytest.mark.parametrize(("pattern", "instead", "fault"), [
    (r"@sha256:\w+", "", "no digest"),
    (r":12.8.1-runtime-ubuntu24.04@", "@", "no digest"),
    (r"@sha256:\w{8}", "@sha256:00000000", "not what lock/images.toml pins"),
    (r"12.8.1-runtime", "12.8.1-devel", "not what lock/images.toml pins"),
    (r"--no-install-recommends ", "", "apt-get install"),
    (r"--require-hashes ", "", "pip install"),
    (r"USER 12345:12345", "USER root", "the last USER is root"),
    (r"COPY lock/grader.txt", "ADD https://example.org/x", "brings in what nothing pins"),
])
def test_the_lint_finds(pattern: str, instead: str, fault: str):
    broken, count = re.subn(pattern, instead, GOOD)
    assert count == 1
    (found,) = faults(broken, images())
    assert fault in found


def test_the_twin_has_what_the_contest_names_and_no_compiler_of_cuda():
    pins = read_pins(ROOT / "lock" / "grader.txt")
    assert {"pip", "numpy", "pillow", "safetensors", "httpx"} <= pins.keys()
    assert (pins["torch"].version, pins["transformers"].version) == ("2.8.0", "4.57.1")
    assert "sanic" not in pins
    assert PREINSTALLED.keys() <= pins.keys()
    assert "runtime" in images()["cuda-runtime"]["reference"]


STAND_IN = """FROM localhost/draftmill-base
RUN printf '#!/bin/sh\\nexit 0\\n' >/usr/bin/apt-get \\
    && printf '#!/bin/sh\\nmkdir -p /opt/venv/bin; cp /usr/bin/apt-get /opt/venv/bin/pip\\n' \\
        >/usr/bin/python3.12 \\
    && chmod 755 /usr/bin/apt-get /usr/bin/python3.12
"""


def build(*arguments: str, code: int = 0) -> str:
    options = ("--isolation", "chroot", "--pull=never", "--layers=false")
    command = [podman_or_skip(), "build", *options, *arguments]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert built.returncode == code, built.stdout + built.stderr
    return built.stderr


@pytest.fixture(scope="module")
def stand_in_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image in which apt-get and Python do nothing, so that a Dockerfile needs no network on it."""
    folder, name = tmp_path_factory.mktemp("base"), "localhost/draftmill-test-base"
    (folder / "Dockerfile").write_text(STAND_IN)
    build("--tag", name, str(folder))
    yield name
    subprocess.run(["podman", "rmi", "--force", name], capture_output=True, check=False)


@pytest.mark.parametrize("kind", ["build", "grader"])
def test_podman_carries_out_every_instruction_on_a_stand_in_base(
        kind: str, stand_in_base: str, tmp_path: Path):
    name, text = f"localhost/draftmill-test-{kind}", (ROOT / "docker" / f"{kind}.Dockerfile").read_text()
    common = ("--from", stand_in_base, "--build-arg", "LOCKED=abc")
    build(*common, "--tag", name, "--file", str(ROOT / "docker" / f"{kind}.Dockerfile"), str(ROOT))
    inspect = ["podman", "image", "inspect", name]
    found = json.loads(subprocess.run(inspect, capture_output=True, check=True).stdout)
    subprocess.run(["podman", "rmi", "--force", name], capture_output=True, check=True)
    config = found[0]["Config"]
    assert config["Labels"] == {"org.draftmill.image": kind, "org.draftmill.locked": "abc",
                                "org.draftmill.system": "Ubuntu 24.04"} | _labels_of_podman(config["Labels"])
    assert config["User"] == {"build": "65534:65534", "grader": "12345:12345"}[kind]
    assert "PATH=/opt/venv/bin:" in "".join(config["Env"])
    (tmp_path / "Dockerfile").write_text(text.replace("\nCOPY", "\nCOPPY"))
    assert "COPPY" in build(*common, "--file", str(tmp_path / "Dockerfile"), str(ROOT), code=125)


def _labels_of_podman(labels: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in labels.items() if name.startswith("io.buildah")}


def flags(engine: str, folder: Path, *arguments: str, code: int = 0) -> list[str]:
    stand_in(folder, engine, info="1.0")
    command = [str(ROOT / "docker" / "run"), engine, *arguments]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stderr
    return (done.stdout + done.stderr).splitlines()


def value(said: list[str], flag: str) -> list[str]:
    return [said[index + 1] for index, word in enumerate(said) if word == flag]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_is_given_nothing_that_was_not_named(engine: str, tmp_path: Path):
    said = flags(engine, tmp_path / "bin", "--read", str(tmp_path), "--write", f"{tmp_path}=/out",
                 "--env", "TOKEN", "--env", "A=1", "--name", "n", "image", "command", "--flag")
    assert said[-3:] == ["image", "command", "--flag"]
    assert value(said, "--network") == ["none"]
    assert value(said, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert value(said, "--cap-drop") == ["all"]
    assert "no-new-privileges" in value(said, "--security-opt")
    assert value(said, "--mount") == [f"type=bind,source={tmp_path},destination={tmp_path},readonly",
                                      f"type=bind,source={tmp_path},destination=/out"]
    assert value(said, "--env") == ["TOKEN", "A=1"]
    assert "--read-only" in said
    assert not {"--gpus", "--device", "--privileged"} & set(said)


def test_each_engine_gets_a_gpu_in_its_own_words(tmp_path: Path):
    assert value(flags("docker", tmp_path, "--gpus", "i", "c"), "--gpus") == ["all"]
    podman = flags("podman", tmp_path, "--gpus", "i", "c")
    assert value(podman, "--device") == ["nvidia.com/gpu=all"]
    assert "--gpus" not in podman  # which podman takes, and ignores


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("--read", "/no/such/place", "i", "c"), "/no/such/place is not there"),
    (("--read", "/a,b", "i", "c"), "a path with a comma"),
    (("--raed", "/tmp", "i", "c"), "--raed: there is no such option"),
    (("i",), "an image and a command are needed"),
])
def test_a_mistake_is_a_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path):
    (line,) = flags("podman", tmp_path / "bin", *arguments, code=2)
    assert sentence in line


@pytest.mark.parametrize("script", ["base", "images"])
def test_an_image_cannot_be_made_without_an_engine(script: str, tmp_path: Path):
    for name in ("docker", "podman"):
        stand_in(tmp_path, name)
    command = [str(ROOT / "docker" / script), sys.executable]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "no container engine answers; install" in done.stderr


def test_the_scripts_are_sound_shell():
    for name in ("run", "base", "images", "../.ci/engine", "../.ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / "docker" / name)], check=True)
        assert os.access(ROOT / "docker" / name, os.X_OK)
