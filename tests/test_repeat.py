"""What repeats, what is not done twice, and what a change re-runs."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mill import STAGES, Mill, finished, payload_sums

from stages.profile import load_profile
from stages.wrapper.declaration import read_declarations
from stages.wrapper.digests import Digests
from stages.wrapper.state import state_of


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mill, "subprocess.Popen[str]"]]:
    """A clean run in another folder, under way beside the other tests."""
    mill = Mill.make(tmp_path_factory.mktemp("mill") / "my drafts (v2)")
    process = mill.start("pack", "--with-upstream")
    yield mill, process
    process.kill()
    process.communicate()


@pytest.fixture
def copy(first: Mill, tmp_path: Path) -> Mill:
    return first.copy(tmp_path / "copy")


def reasons(mill: Mill) -> dict[str, str]:
    """For each stage that would run as things stand, why."""
    profile, digests = load_profile("toy", mill.root / "profiles"), Digests(mill.root)
    states = {stage: state_of(mill.root, profile, declaration, digests)
              for stage, declaration in read_declarations(mill.root).items()}
    return {stage: state.reason for stage, state in states.items() if state.reason}


def test_a_second_run_does_nothing(copy: Mill) -> None:
    before = {path: path.stat().st_mtime_ns for path in (copy.root / "logs").rglob("*")}
    said = copy.run("all")
    assert said.splitlines()[1:] == [f"{stage}: up to date" for stage in read_declarations(copy.root)]
    assert {path: path.stat().st_mtime_ns for path in (copy.root / "logs").rglob("*")} == before


COSMETIC = {
    "stages/training/trainer.py": ('"""The training loop', '"""That training loop'),
    "stages/distill.py": ("def run(job", "# A comment.\n\n\ndef run(job"),
    "stages/teacher.py": ('"""Make one shard', '"""Make a shard'),
    "stages/sources/template.py": ('"""Prompts from', '"""Many prompts from'),
    "drafter/model.py": ('"""', '"""So: '),
    "drafter/server.py": ("import ", "# A comment in shipped code.\nimport "),
    "drafter/codecs/int4.py": ('"""Quantise', '"""Do quantise'),
    "profiles/toy.toml": ("[distill]", "# A comment.\n[distill]"),
    "lock/build.in": ("# ", "## "),
}


def test_touching_files_comments_and_docstrings_rerun_nothing(copy: Mill) -> None:
    for path in copy.root.rglob("*"):
        if path.is_file():
            path.touch()
    for name, (old, new) in COSMETIC.items():
        text = (copy.root / name).read_text()
        assert old in text, name
        copy.write(name, text.replace(old, new, 1))
    assert reasons(copy) == {}
    assert copy.run("pack").splitlines() == ["pack: up to date"]


@pytest.mark.parametrize(("name", "old", "new", "stages"), [
    ("stages/distill.py", "LAYER = ", "OTHER = 1\nLAYER = ", {"distill"}),
    ("profiles/toy.toml", "learning_rate = 4e-3", "learning_rate = 3e-3", {"distill"}),
    ("profiles/toy.toml", "layers = [0, 1, 3]", "layers = [0, 2, 3]", {"distill", "pack"}),
    ("profiles/toy.toml", "minutes = 0", "minutes = 4", set()),
    ("stages/training/optimiser.py", "BETAS = (0.9, 0.95)", "BETAS = (0.9, 0.96)", {"distill", "qat"}),
    ("stages/training/shards.py", "kept = [", "unused = 1\n    kept = [", {"teacher"}),
    ("stages/training/rows.py", "class Rows:", "UNUSED = 1\n\n\nclass Rows:", {"distill", "qat"}),
    ("drafter/server.py", "import ", "UNUSED = 1\nimport ", {"pack"}),
    ("serve.sh", "umask 077", "umask 027", {"pack"}),
    ("profiles/toy.toml", "top_k = 4", "top_k = 5", {"teacher", "pack"}),
    ("profiles/toy.toml", "rows = 28", "rows = 27", {"data"}),
    ("profiles/toy.toml", "[limits]", "[selfcheck]\nretries = 1\n[limits]", {"selfcheck"}),
])  # fmt: skip
def test_a_change_is_charged_to_the_stages_that_read_it(
        copy: Mill, name: str, old: str, new: str, stages: set[str]) -> None:
    text = (copy.root / name).read_text()
    assert old in text
    copy.write(name, text.replace(old, new, 1))
    assert set(reasons(copy)) == stages


def test_a_constant_of_the_training_reruns_it_and_what_follows_alone(copy: Mill) -> None:
    copy.replace("stages/training/optimiser.py", "BETAS = (0.9, 0.95)", "BETAS = (0.9, 0.5)")
    said = copy.run("pack", "--with-upstream")
    ran = {stage for stage in STAGES if f"{stage}: runs" in said}
    assert ran == {"distill", "qat", "pack"}
    assert "distill: runs, because code stages.training.optimiser changed" in said


def test_two_clean_runs_in_different_folders_give_the_same_payload(
        first: Mill, second: tuple[Mill, "subprocess.Popen[str]"]) -> None:
    other, process = second
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert payload_sums(other) == payload_sums(first)
    for stage in ("data", "teacher", "distill", "qat", "wheels"):
        assert other.files(stage) == first.files(stage), stage
