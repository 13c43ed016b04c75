"""serve.sh: from copies of an output folder, as the grader and others would start it."""

import base64
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
from serving import ROOT, environment, free_port, started, write_model

INFO = "draftmill_probe-1.0.dist-info"
WHEEL = "draftmill_probe-1.0-py3-none-any.whl"
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A whole output folder: model, code, serve.sh, and a wheelhouse of one wheel."""
    folder = write_model(tmp_path_factory.mktemp("made") / "output")
    shutil.copy(ROOT / "serve.sh", folder)
    shutil.copytree(ROOT / "drafter", folder / "drafter", ignore=shutil.ignore_patterns("__pycache__"))
    write_wheelhouse(folder / "wheels")
    return folder


def write_wheelhouse(folder):
    folder.mkdir()
    files = {
        "draftmill_probe.py": b"ANSWER = 42\n",
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: draftmill-probe\nVersion: 1.0\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={urlsafe(content)},{len(content)}\n" for name, content in files.items()]
    record = f"{INFO}/RECORD"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(rows) + f"{record},,\n")
    digest = hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()
    (folder / "requirements.txt").write_text(f"draftmill-probe==1.0 --hash=sha256:{digest}\n")


def urlsafe(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def snapshot(folder):
    """Every file's bytes, and every name's mode."""
    paths = sorted(folder.rglob("*"))
    return [
        (
            str(path.relative_to(folder)),
            stat.S_IMODE(path.stat().st_mode),
            path.read_bytes() if path.is_file() else None,
        )
        for path in paths
    ]


def served(script, log, **env):
    settings = {"PATH": PATH, "HOST": "127.0.0.1", **env}
    return started(["bash", str(script)], log, cwd=Path("/"), **settings)


def ended(script, **env):
    settings = environment(**{"PATH": PATH, "HOST": "127.0.0.1", **env})
    return subprocess.run(
        ["bash", str(script)], cwd="/", env=settings, capture_output=True, text=True, timeout=60, check=False
    )


def draft(server):
    answer = httpx.post(f"{server.url}/draft", json={"tokens": [1, 2, 3]}, trust_env=False, timeout=60)
    assert answer.status_code == 200
    return answer.json()["draft"]


def installed(folder):
    return list(folder.glob(f"draftmill-{os.getuid()}-*/site/draftmill_probe.py"))


def test_two_first_starts_at_once_by_a_link_into_a_closed_folder_with_spaces(output, tmp_path):
    place = tmp_path / "sub mission (v2)"
    shutil.copytree(output, place)
    before = snapshot(place)
    for path in [place, *place.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    link = tmp_path / "a link.sh"
    link.symlink_to("sub mission (v2)/serve.sh")
    temporary = tmp_path / "t t"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "HOME": "/nonexistent", "http_proxy": "http://127.0.0.1:9"}
    with (
        served(link, tmp_path / "log1", MODEL_NAME="one", CDPATH="/usr:/", **env) as first,
        served(place / "serve.sh", tmp_path / "log2", **env) as second,
    ):
        first.wait_until_ready()
        second.wait_until_ready()
        assert len(draft(first)) == 16
        assert draft(first) == draft(second)
        version = httpx.get(f"{first.url}/version", trust_env=False).json()
        assert version["model"] == "one"
        weights = (place / "model.safetensors").read_bytes()
        assert version["weights_sha256"] == hashlib.sha256(weights).hexdigest()
        assert (first.stop(), second.stop()) == (0, 0)
    assert len(installed(temporary)) == 1
    assert not list(temporary.glob("draftmill-*/new.*"))
    for path in [place, *place.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert [row[::2] for row in snapshot(place)] == [row[::2] for row in before]


def test_a_killed_server_comes_back_and_a_second_on_its_port_does_not(output, tmp_path):
    port = str(free_port())
    with served(output / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path), PORT=port) as server:
        server.wait_until_ready()
        result = ended(output / "serve.sh", TMPDIR=str(tmp_path), PORT=port)
        assert result.returncode == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
        assert "Traceback" not in result.stderr
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        server.wait_until_ready(starts=2)
        assert draft(server)
        assert "starting it again" in server.log.read_text()
        assert server.stop() == 0


def test_what_the_user_can_mend_is_a_sentence(output, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    wheel = copy / "wheels" / WHEEL
    wheel.write_bytes(wheel.read_bytes() + b"!")
    result = ended(copy / "serve.sh", TMPDIR=str(tmp_path))
    assert (result.returncode, "do not install" in result.stderr) == (2, True)
    assert not installed(tmp_path)
    shutil.rmtree(copy / "wheels")
    result = ended(copy / "serve.sh", TMPDIR=str(tmp_path))
    assert (result.returncode, "requirements.txt is missing" in result.stderr) == (2, True)
    result = ended(output / "serve.sh", TMPDIR=str(tmp_path), PYTHON="no-such-python")
    assert (result.returncode, "there is no no-such-python" in result.stderr) == (2, True)


def test_another_version_or_no_torch_is_named(output, tmp_path):
    fake = tmp_path / "python"
    for answer, sentence in (("3.11 torch 0", "is Python 3.11"), ("3.12 no-torch 0", "has no torch")):
        fake.write_text(f"#!/bin/sh\necho {answer}\n")
        fake.chmod(0o755)
        result = ended(output / "serve.sh", TMPDIR=str(tmp_path), PYTHON=str(fake))
        assert (result.returncode, sentence in result.stderr) == (2, True)
        assert "3.12 with torch first on PATH" in result.stderr


@pytest.mark.parametrize("planted", ["link", "foreign"])
def test_a_planted_folder_is_not_trusted(output, tmp_path, planted):
    digest = hashlib.sha256((output / "wheels/requirements.txt").read_bytes()).hexdigest()[:16]
    home = tmp_path / f"draftmill-{os.getuid()}-{digest}"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        home.symlink_to("elsewhere")
    else:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        home.mkdir()
        os.chown(home, 12345, 12345)
    result = ended(output / "serve.sh", TMPDIR=str(tmp_path))
    assert (result.returncode, "is not trusted" in result.stderr) == (2, True)


def test_a_server_that_keeps_failing_is_given_up(output, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    (copy / "drafter" / "server.py").write_text("import sys; sys.exit(7)\n")
    script = copy / "serve.sh"
    script.write_text(script.read_text().replace('run sleep "$pause"', "run sleep 0"))
    result = ended(script, TMPDIR=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.count("starting it again") == 4
    assert "failed 5 times in a row" in result.stderr


def test_a_signal_during_the_pause_ends_it(output, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    (copy / "drafter" / "server.py").write_text("import sys; sys.exit(7)\n")
    with started(
        ["bash", str(copy / "serve.sh")], tmp_path / "log", TMPDIR=str(tmp_path), PATH=PATH
    ) as server:
        server.wait_for("again in 2 s")
        assert server.stop() == 0
