"""serve.sh: from copies of an output folder, as the grader and others would start it."""

import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path

import httpx
import pytest
from outputs import PATH, WHEEL, child, edit, ended, gone, served, write_output
from serving import environment, free_port

from drafter import supervisor

DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return write_output(tmp_path_factory.mktemp("made") / "output")


def command(pid):
    """The command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


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


def draft(server):
    answer = httpx.post(f"{server.url}/draft", json={"tokens": [1, 2, 3]}, trust_env=False, timeout=60)
    assert answer.status_code == 200
    return answer.json()["draft"]


def home(output):
    """The name of the folder that wheels are installed to."""
    digest = hashlib.sha256((output / "wheels/requirements.txt").read_bytes()).hexdigest()[:16]
    return f"draftmill-{os.getuid()}-{digest}"


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
        os.kill(child(server), signal.SIGKILL)
        assert draft(server)  # at once: it waits for the next server, and is not refused
        assert "starting it again in 0 s" in server.log.read_text()
        assert server.stop() == 0


def test_a_killed_serve_sh_leaves_nothing_behind_and_starts_anew_at_once(output, tmp_path):
    env = {"TMPDIR": str(tmp_path), "PORT": str(free_port())}
    with served(output / "serve.sh", tmp_path / "log1", **env) as first:
        first.wait_until_ready()
        left = child(first)
        first.kill()
        with served(output / "serve.sh", tmp_path / "log2", **env) as second:
            second.wait_until_ready()
            assert gone(left)
            assert draft(second)
            assert second.stop() == 0


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
    place = tmp_path / home(output)
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to("elsewhere")
    else:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        place.mkdir()
        os.chown(place, 12345, 12345)
    result = ended(output / "serve.sh", TMPDIR=str(tmp_path))
    assert (result.returncode, "is not trusted" in result.stderr) == (2, True)


@pytest.fixture
def failing(output, tmp_path):
    """A copy whose server ends with 7, at once."""
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    (copy / "drafter" / "server.py").write_text("import sys; sys.exit(7)\n")
    return copy


def test_a_server_that_has_been_up_is_started_again_whatever_it_ends_by(output, tmp_path):
    """A file that is gone for a moment, and a signal that is meant for serve.sh."""
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    with served(copy / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()
        (copy / "model.safetensors").rename(copy / "elsewhere")
        os.kill(child(server), signal.SIGKILL)
        server.wait_for("ended with code 2; starting it again in 1 s\n")
        (copy / "elsewhere").rename(copy / "model.safetensors")
        assert draft(server)
        os.kill(child(server), signal.SIGTERM)
        server.wait_for("ended with code 0; starting it again")
        assert draft(server)
        assert server.stop() == 0


def test_it_says_how_it_is_used_and_ends(output, tmp_path):
    with served(output / "serve.sh", tmp_path / "log", "--help", TMPDIR=str(tmp_path)) as server:
        assert server.process.wait(60) == 0
        said = server.log.read_text()
        assert said.startswith("usage: ") and "--log-level" in said and "again" not in said


class Ended(supervisor.Supervisor):
    """A supervisor of servers that end with given codes after given seconds, and of no process."""

    def __init__(self, listener, lives, monkeypatch):
        super().__init__([], listener)
        self.lives, self.clock, self.pauses, self.plain = lives[::-1], 0.0, [], []
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(supervisor.signal, "sigtimedwait", lambda _, pause_s: self.pauses.append(pause_s))

    def _serve(self, plain):
        code, seconds = self.lives.pop()
        self.plain.append(plain)
        self.clock += seconds
        self.told = not self.lives
        return code


def test_pauses_grow_and_begin_anew_after_a_steady_life(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = Ended(listener, [(1, 10)] * 8 + [(1, 299), (1, 300), (1, 10), (0, 0)], monkeypatch)
        assert ended.run() == 0
    assert ended.pauses == [0, 1, 2, 4, 8, 15, 15, 15, 15, 0, 1]


def test_kernels_are_done_without_after_a_failed_start_or_two_failures_in_a_row(monkeypatch):
    with socket.socket() as never_up, socket.create_server(("127.0.0.1", 0)) as up:
        first = Ended(never_up, [(1, 240), (-11, 10), (0, 0)], monkeypatch)
        first.run()
        later = Ended(up, [(-9, 10), (2, 1), (2, 1), (-9, 10), (1, 400), (1, 240), (0, 0)], monkeypatch)
        later.run()
    assert first.plain == [False, True, True]
    assert later.plain == [False, False, False, False, True, False, True]


def test_a_server_that_never_comes_up_is_given_up(failing, tmp_path):
    edit(failing / "drafter" / "supervisor.py", "LONGEST_PAUSE_S = 15", "LONGEST_PAUSE_S = 0")
    result = ended(failing / "serve.sh", TMPDIR=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.count("starting it again") == 4
    assert "failed 5 times in a row, the last time with code 7" in result.stderr


def test_a_signal_during_a_pause_ends_it(failing, tmp_path):
    with served(failing / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path)) as server:
        server.wait_for("again in 1 s")
        assert server.stop() == 0


def test_neither_ignored_children_nor_a_closed_log_end_it(failing, tmp_path):
    """As under a parent that reaps no children, and after whoever read the log has gone."""
    once = f"import pathlib, sys; p = pathlib.Path({str(tmp_path / 'once')!r}); n = p.exists(); p.touch()\n"
    (failing / "drafter" / "server.py").write_text(f"{once}sys.exit(2 if n else 7)\n")
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        ["bash", "-c", f"trap '' CHLD; exec bash {failing}/serve.sh"], stderr=writer,
        env=environment(PATH=PATH, HOST="127.0.0.1", TMPDIR=str(tmp_path)),
    )  # fmt: skip
    os.close(writer)
    try:
        assert process.wait(60) == 2
    finally:
        process.kill()


def test_a_server_that_cannot_even_be_started_is_tried_and_given_up(monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0)
    with socket.socket() as listener:
        assert supervisor.Supervisor(["/no/such/python"], listener).run() == 1
    assert capfd.readouterr().err.count("cannot be started: [Errno 2]") == 5


def test_a_server_that_does_not_hear_is_ended(output, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    (copy / "drafter" / "server.py").write_text(DEAF)
    edit(copy / "drafter" / "supervisor.py", "STOP_S = 9.5", "STOP_S = 0.5")
    with served(copy / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path)) as server:
        server.wait_for("up")
        left = child(server)
        assert server.stop() == 1
        assert gone(left)
        assert "did not go down within 0.5 s" in server.log.read_text()


def test_arguments_are_the_servers(output, tmp_path):
    arguments = ("--log-level", "debug")
    with served(output / "serve.sh", tmp_path / "log", *arguments, TMPDIR=str(tmp_path)) as server:
        server.wait_until_ready()
        draft(server)
        assert [event["level"] for event in server.events() if event["event"] == "request"] == ["debug"]
        assert server.stop() == 0


def test_what_is_left_of_an_installation_is_mended(failing, tmp_path):
    """Also what was killed in the midst of it, an hour and more ago."""
    assert ended(failing / "serve.sh", TMPDIR=str(tmp_path), PORT="none").returncode == 2
    probe, = installed(tmp_path)
    old, new = (probe.parents[1] / name for name in ("new.old", "new.new"))
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1, 1))
    whole = probe.read_bytes()
    for damage in (probe.unlink, lambda: probe.write_bytes(whole[:-1])):
        damage()
        result = ended(failing / "serve.sh", TMPDIR=str(tmp_path), PORT="none")
        assert "are damaged; they are installed anew" in result.stderr
        assert probe.read_bytes() == whole
    result = ended(failing / "serve.sh", TMPDIR=str(tmp_path), PORT="none")
    assert result.stderr.count("\n") == 1 and "PORT is 'none'" in result.stderr
    assert sorted(path.name for path in probe.parents[1].iterdir()) == ["new.new", "site"]


@pytest.fixture
def others(output):
    """Where the wheels go if TMPDIR does not do; emptied before and after."""
    homes = [Path(folder) / home(output) for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    for one in homes:
        shutil.rmtree(one, ignore_errors=True)
    yield homes
    for one in homes:
        shutil.rmtree(one, ignore_errors=True)


def test_a_folder_without_room_is_passed_over(failing, others, tmp_path):
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\ncase "$*,$TMPDIR" in *pip*,*$FULL*)\n'
        'echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"\n'
        "exit 1\n"
        'esac\nexec python "$@"\n'
    )
    fake.chmod(0o755)
    env = {"TMPDIR": str(tmp_path), "PYTHON": str(fake), "PORT": "none"}
    result = ended(failing / "serve.sh", FULL=str(tmp_path), **env)
    assert (result.returncode, "PORT is 'none'" in result.stderr) == (2, True)
    assert [(one / "site/draftmill_probe.py").exists() for one in others] == [True, False, False]
    shutil.rmtree(others[0])
    result = ended(failing / "serve.sh", FULL="/", **env)
    assert (result.returncode, f"no room for the wheels in {tmp_path} /tmp" in result.stderr) == (2, True)


def test_a_signal_during_the_installation_leaves_nothing_behind(output, tmp_path):
    slow = tmp_path / "python"
    slow.write_text('#!/bin/sh\ncase "$*" in *pip*) exec sleep 60 ;; esac\nexec python "$@"\n')
    slow.chmod(0o755)
    with served(output / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path), PYTHON=str(slow)) as server:
        while b"sleep" not in command(installer := child(server)):
            assert server.process.poll() is None
        assert server.stop() == 0
        assert gone(installer)
    assert not list(tmp_path.glob("draftmill-*/new.*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_without_a_word(output, tmp_path, number):
    slow = shutil.copytree(output, tmp_path / "slow")
    edit(slow / "drafter" / "loading.py", "import torch\n", "import torch\n\ntime.sleep(600)\n")
    with served(slow / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path)) as server:
        while not child(server) or b"drafter.server" not in command(child(server)):
            assert server.process.poll() is None
        left = child(server)
        server.process.send_signal(number)
        assert server.process.wait(10) == 0
        assert gone(left)
        assert server.log.read_text() == ""


def test_an_interrupt_from_a_terminal_reaches_the_server_by_its_parent_alone(failing, tmp_path):
    (failing / "drafter" / "server.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\nprint('up')\ntime.sleep(60)\n"
    )
    with served(failing / "serve.sh", tmp_path / "log", TMPDIR=str(tmp_path)) as server:
        server.wait_for("up")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
        assert server.log.read_text() == "up\n"


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damaged_weights_end_it_at_once_with_their_name(output, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(content if damage == "flipped" else content[:-1])
    result = ended(copy / "serve.sh", TMPDIR=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    said = {"flipped": ": tensor ", "cut": f": {len(content) - 1} bytes, not a", "missing": " is missing"}
    assert f"{weights}{said[damage]}" in result.stderr
