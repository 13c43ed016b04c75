"""The plan: of a fresh repository, of a built one, and of the contest's job."""

from pathlib import Path

import pytest
from workshop import Workshop

from stages.plan import plan
from stages.profile import load_profile
from stages.wrapper.declaration import read_declarations

ROOT = Path(__file__).resolve().parent.parent
PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.toml") if path.stem != "base")


def test_before_anything_was_built(tmp_path: Path) -> None:
    said = Workshop(tmp_path).run(module="plan")
    assert "fetch: Bring a word." in said
    assert "would run, because it has no record" in said
    assert "waits: it takes what fetch leaves, and fetch has not run" in said
    assert "fetch/smollm2-135m-instruct/* (missing), examples/*.jsonl" in said
    assert not (tmp_path / "build").exists()


def test_after_a_build_and_a_change(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.run("all")
    assert shop.run(module="plan").count("up to date") == 4
    shop.replace("stages/grain.py", "2", "3")
    said = shop.run(module="plan")
    assert "would run, because code stages.grain changed" in said
    assert "distill/*.txt (stale)" in said
    assert "up to date, unless distill leaves something else" in said
    shop.ran()
    shop.run(module="plan")
    assert shop.ran() == []


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_of_this_repository_can_be_planned(profile: str) -> None:
    text = "\n".join(plan(ROOT, load_profile(profile, ROOT / "profiles")))
    for stage in read_declarations(ROOT):
        assert f"\n{stage}: " in text
    assert "cannot run" not in text
