"""The Makefile: help, order, paths with spaces, and an environment that repairs itself."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop

from stages.wrapper.code import code_digests, parse
from stages.wrapper.declaration import read_declarations

ROOT = Path(__file__).resolve().parent.parent
EVERY_STAGE = ["fetch", "data", "distill", "pack"]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path / "my drafts (v2) & more")
    shop.write("stages/report.py", 'print("the report")\n')
    for stage in ("teacher", "qat"):
        shop.write(f"stages/{stage}.py", "")
    return shop


def _make(shop: Workshop, *arguments: str, code: int = 0, **environment: str) -> str:
    process = _start(shop, *arguments, **environment)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"exit {process.returncode}\n{out}{err}"
    return out + err


def _start(shop: Workshop, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start make where `python3` is the interpreter of this test."""
    python = shop.write("bin/python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    outer_make = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    kept = {name: value for name, value in os.environ.items() if name not in outer_make}
    settings = {"PATH": f"{python.parent}:{os.environ['PATH']}", "RUNNER": "system", "PROFILE": "toy",
                "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["make", *arguments], cwd=shop.root, text=True, env=kept | settings | environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_make_alone_prints_every_target_with_one_line(workshop: Workshop) -> None:
    said = _make(workshop)
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    stages = re.search(r"^STAGES := (.*)$", text, re.MULTILINE)
    assert phony and stages
    for target in phony[1].replace("$(STAGES)", stages[1]).split():
        assert len(re.findall(rf"^  {target} +\S", said, re.MULTILINE)) == 1, target


def test_every_stage_has_its_target() -> None:
    stages = re.search(r"^STAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert stages
    assert set(read_declarations(ROOT)) <= set(stages[1].split())


def test_all_says_first_what_it_builds_and_last_what_came_of_it(workshop: Workshop) -> None:
    said = _make(workshop, "all")
    assert said.startswith("draftmill: profile toy, limit 48,000,000 bytes")
    assert "the report" in said
    assert workshop.ran() == EVERY_STAGE
    _make(workshop, "all")
    assert workshop.ran() == []


def test_one_target_runs_what_it_rests_on(workshop: Workshop) -> None:
    _make(workshop, "distill")
    assert workshop.ran() == ["fetch", "data", "distill"]


def test_clean_and_all_in_parallel_are_clean_and_then_all(workshop: Workshop) -> None:
    _make(workshop, "all")
    before = workshop.outputs()
    workshop.ran()
    _make(workshop, "-j8", "clean", "all")
    assert workshop.ran() == EVERY_STAGE
    after = workshop.outputs()
    assert {name: data for name, data in after.items() if "/." not in name} == {
        name: data for name, data in before.items() if "/." not in name}
    _make(workshop, "-j4", "pack", "distill", "data")
    assert workshop.ran() == []


def test_clean_waits_for_a_stage_at_work(workshop: Workshop) -> None:
    workshop.close_gate(0)
    building = _start(workshop, "all")
    workshop.wait_for_arrival()
    cleaning = _start(workshop, "clean")
    assert "waiting" in cleaning.stderr.readline()
    workshop.open_gate()
    (workshop.root / "never").open("w").close()
    for process in (building, cleaning):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
    assert not (workshop.root / "output").exists()
    assert (workshop.root / "vendor").exists()


def test_a_failing_stage_fails_make(workshop: Workshop) -> None:
    workshop.replace("stages/data.py", "    count(job)\n", '    raise ValueError("odd")\n')
    said = _make(workshop, "all", code=2)
    assert "data: failed: ValueError: odd" in said
    assert "the report" not in said


def test_without_a_python_there_is_a_sentence(workshop: Workshop) -> None:
    said = _make(workshop, "plan", code=2, RUNNER="host", PYTHON="/nowhere/python3.12")
    assert "no Python 3.12 found at /nowhere/python3.12" in said
    assert "PYTHON=/path/to/python3.12" in said
    assert not (workshop.root / ".venv").exists()


def test_an_environment_behind_a_link_is_not_emptied(workshop: Workshop, tmp_path: Path) -> None:
    theirs = tmp_path / "their environment"
    theirs.mkdir()
    (theirs / "kept").touch()
    (workshop.root / ".venv").symlink_to(theirs)
    for lock in ("build", "dev"):
        workshop.write(f"lock/{lock}.txt", "")
    said = _make(workshop, "install", code=2, RUNNER="host")
    assert f".venv is a link to {theirs}" in said
    assert "remove the link (rm .venv)" in said
    assert (theirs / "kept").exists()
    assert "Traceback" not in said


def test_a_system_python_without_the_libraries_gets_a_sentence(workshop: Workshop) -> None:
    bare = workshop.write("bare/python3", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    said = _make(workshop, "plan", code=2, PATH=f"{bare.parent}:{os.environ['PATH']}")
    assert "it lacks pydantic, tqdm, rich; install that, or use RUNNER=host" in said
    assert "Traceback" not in said


def test_what_an_older_python_reads_before_the_sentence_suits_it() -> None:
    for module in code_digests(ROOT, ["stages.environment"]):
        place = ROOT / module.replace(".", "/")
        tree = parse(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
        future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        unions = [node for node in ast.walk(tree)
                  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
        assert future or not unions, f"{module}: Python 3.9 has no A | B of types"


def test_the_environment_is_made_once_and_repairs_itself(workshop: Workshop) -> None:
    host = {"RUNNER": "host", "PIP_NO_INDEX": "1"}
    workshop.write("lock/dev.txt", "no-such-thing==1.0 --hash=sha256:" + "0" * 64 + "\n")
    workshop.write("lock/build.txt", "")
    said = _make(workshop, "install", code=2, **host)
    assert "No matching distribution found for no-such-thing" in said
    assert "pip could not install the locks" in said
    workshop.write("lock/dev.txt", "")
    assert ".venv is ready" in _make(workshop, "install", **host)
    assert _make(workshop, "install", **host) == ""
    python = workshop.root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.12")  # an upgrade of the system has taken it away
    assert ".venv is ready" in _make(workshop, "install", **host)
    assert python.exists()
    workshop.write("lock/dev.txt", "# another state\n")
    workshop.run("--check", module="environment", code=1)
