"""Arms of a bench, shared by workers: each is made once, and what is missing is made later."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import variety
from benchmarks.arms import CODECS, Arm, arm_of, section
from benchmarks.comparison import compared, difference, ratio
from benchmarks.tau import Plan, leaders, report
from benchmarks.workers import Line, Lines, latest, work
from drafter import codecs, weights
from drafter.model import Decoder
from stages.bits.bases import BASES
from stages.bits.views import fixed_plan
from stages.errors import UserError
from stages.profile import load_profile

ROOT = Path(__file__).resolve().parent.parent
TOLD: Line = {"file_bytes": 1, "bits_per_weight": 1.0, "train_s": 1.0, "distill_steps": 1, "qat_steps": 1,
              "tokens": 1}  # fmt: skip
KEYS: list[Line] = [{"arm": number, "origin": "here"} for number in range(4)]


def missing(lines: list[Line]) -> list[Line]:
    return [key for key in KEYS if key not in [{"arm": one["arm"], "origin": one["origin"]} for one in lines]]


def test_each_arm_leaves_one_line_and_a_later_run_makes_what_is_missing(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "arms.jsonl")

    def make(key: Line) -> Line:
        if key["arm"] == 2:
            raise UserError("does not fit")
        return {"tau": key["arm"] / 2}

    assert work(lines, missing, make) == 1
    assert [one["arm"] for one in lines.read()] == [0, 1, 3]
    assert work(lines, missing, lambda key: {"tau": -1.0}) == 0
    assert [(one["arm"], one["tau"]) for one in lines.read()] == [(0, 0.0), (1, 0.5), (3, 1.5), (2, -1.0)]


def test_a_line_cut_by_a_kill_is_no_line(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "arms.jsonl")
    lines.add(KEYS[0])
    with lines.path.open("a") as stream:
        stream.write('{"arm": 1, "ori')
    assert lines.read() == KEYS[:1]
    lines.add(KEYS[2])
    assert lines.read() == [KEYS[0], KEYS[2]]


def test_what_another_process_is_at_is_left_to_it_until_it_dies(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "arms.jsonl")
    hold = ("import sys; from pathlib import Path; from benchmarks.workers import Lines; "
            f"held = Lines(Path({str(lines.path)!r})).claim({KEYS[0]!r}); print('held', flush=True); "
            "sys.stdin.read()")
    other = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    assert work(lines, missing, lambda key: {}) == 0
    assert [one["arm"] for one in lines.read()] == [1, 2, 3]
    other.kill()
    other.communicate()
    work(lines, missing, lambda key: {})
    assert [one["arm"] for one in lines.read()] == [1, 2, 3, 0]


def line(arm: Arm, tau: float, steps: int = 10) -> Line:
    found = {"tau": tau, "low": tau, "high": tau}
    counts = [[round(tau * steps), steps]] * 5
    return asdict(arm) | {"origin": "here", "tau_a": found, "tau_b": found, **TOLD, "counts_a": counts,
                          "counts_b": counts}  # fmt: skip


def test_the_best_two_get_another_seed_before_the_rest() -> None:
    plan = Plan()
    first = [Arm(codec, layers, plan.sizes[0], plan.seconds) for codec, layers in plan.first]
    nothing = list(plan.arms([]))
    assert nothing[: len(first)] == first
    assert all(arm.seed == 0 for arm in nothing)
    taus = {"int4 g32": 2.0, "int4 g64 clipped": 2.1, "entropy": 3.0}
    lines = [line(arm, taus[arm.codec] + arm.layers / 100) for arm in first]
    following = list(plan.arms(lines))[len(first) :]
    best = [replace(arm_, seed=1) for arm_ in (first[1], first[3])]
    assert following[:2] == best
    assert list(plan.arms(lines[:4]))[len(first) :][:2] == best  # the last of the first may be under way
    doubled = [arm for arm in following if arm.seconds == 2 * plan.seconds]
    assert {arm.codec for arm in doubled} == {"entropy", "int4 g64 clipped"}


def test_a_doubling_that_gains_little_is_the_last() -> None:
    plan = Plan()
    lines = [line(Arm(codec, layers, plan.sizes[0], plan.seconds), 2.0) for codec, layers in plan.first]
    best = leaders(lines, plan.target_layers)
    doubled = [replace(arm_of(one), seconds=2 * plan.seconds) for one in best]
    more = [*lines, line(doubled[0], 2.001), line(doubled[1], 2.5)]
    longest = [arm for arm in plan.arms(more) if arm.seconds == 4 * plan.seconds]
    assert [arm.codec for arm in longest] == [doubled[1].codec]


def test_the_report_joins_the_seeds_that_both_have(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan()
    one, other = (Arm(codec, layers, plan.sizes[0], plan.seconds) for codec, layers in plan.first[:2])
    lines = [line(one, 2.0), line(other, 3.0)]
    lines += [line(replace(one, seed=1), 2.0), line(replace(other, seed=1), 5.0)]
    (found,) = report(lines, plan)
    assert found["seeds"] == [0, 1]
    assert found["a"] == pytest.approx((2.0, 2.0, 2.0))
    assert "entropy x 24 over int4 g32 x 8, 2 seeds" in capsys.readouterr().out


def test_an_interval_is_of_paired_conversations() -> None:
    random = np.random.default_rng(1)
    steps = random.integers(5, 40, 200)
    first: Any = np.stack([steps * 3, steps], 1)
    second: Any = np.stack([steps * 3, steps + 1 + steps // 2], 1)
    middle, low, high = compared([first], [second], ratio)
    assert middle == pytest.approx(second[:, 1].sum() / first[:, 1].sum())
    assert low < middle < high
    assert high - low < 0.05  # unpaired it would be several times as wide
    assert compared([first], [first], difference) == (0.0, 0.0, 0.0)


def file_bytes(arm: Arm) -> int:
    """Return what a fixed-rate arm's file takes, from shapes alone."""
    config = BASES["SmolLM2-135M"].with_layers(arm.layers)
    profile = load_profile("smollm2-gpu", ROOT / "profiles")
    with torch.device("meta"):
        tensors = Decoder(config).state_dict()
        plan = fixed_plan(tensors, section(profile.qat, CODECS[arm.codec] | {"steps": 0}))
        parts = {name + suffix: torch.empty(shape, dtype=dtype) for name, settings in plan.items()
                 for suffix, (shape, dtype) in codecs.layout(settings).items()}  # fmt: skip
    return weights.size(config, plan, parts)


def test_every_arm_of_a_fixed_rate_fits_its_size() -> None:
    plan = Plan()
    arms = [Arm(*one, size) for size, some in zip(
        plan.sizes, ((*plan.first, *plan.rest), plan.second, plan.third), strict=True) for one in some]
    fixed = [arm for arm in [*arms, Arm(*plan.over)] if CODECS[arm.codec]["codec"] != "entropy"]
    assert len(fixed) >= 6
    for arm in fixed:
        assert file_bytes(arm) <= arm.size_bytes, arm


def test_variety_compares_arms_of_equal_work_and_reports_what_there_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(tmp_path / "variety.jsonl")
    for steps, tau in ((300, 2.0), (600, 3.0)):
        lines.add(line(Arm("the profile's", 24, 10, steps=steps), tau))
    lines.add(line(Arm("the profile's", 24, 10, steps=600, sources="only templates"), 2.0))
    written: dict[str, Any] = {}
    monkeypatch.setattr(variety, "baselines", lambda *_: {})
    monkeypatch.setattr(variety, "write_results", lambda _, found: written.update(found))
    assert variety.main(["--seconds", "0", "--lines", str(lines.path)]) == 0
    assert len(written["arms"]) == 3
    of = {(one["how"], one["of"], one["steps"]): one["a"][0] for one in written["compared"]}
    assert of == {("ratio", "all", 600): 1.5, ("difference", "only templates", 600): -1.0}


def test_variety_begins_no_arm_that_the_clock_would_cut_off() -> None:
    arm = Arm("the profile's", 24, 10, steps=300)
    found = [{"steps": 300, "wall_s": 50.0}, {"steps": 300, "wall_s": 100.0}, {"steps": 600, "wall_s": 900.0}]
    for left_s, fits in ((80.0, False), (130.0, True)):
        assert variety.room(found, arm, time.time() + left_s) is fits
    assert variety.room([], arm, time.time() + 60)
    assert not variety.room([], arm, time.time() - 1)


def test_only_the_newest_code_and_text_are_reported() -> None:
    lines = [{"origin": "old", "arm": 1}, {"origin": "new", "arm": 1}, {"origin": "new", "arm": 2}]
    assert json.dumps(latest(lines)) == json.dumps(lines[1:])
    assert latest([]) == []
