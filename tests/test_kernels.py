"""Triton's kernels, run by its interpreter on the CPU, against plain torch."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")

SETTING = """
import sys, torch
from triton.runtime import interpreter
plain = interpreter._patch_lang_tensor
def patched(tensor, *arguments):  # numpy no longer turns an array of one number into an index
    plain(tensor, *arguments)
    tensor.__index__ = lambda self: int(self.handle.data.item())
interpreter._patch_lang_tensor = patched
sys.path.insert(0, "tests")
from conftest import small_config, small_decoder
from drafter import kernels, trial
from drafter.kernels import attention, products
from drafter.engine import Engine, Generation
trial.ROWS, attention.PROGRAMS, attention.SPLITS = trial.ROWS[:6], 48, 3
products.WIDE, products.DEEP, products.KINDS = 16, 16, (torch.float16, torch.float32)
"""

TRIAL = """
assert (attention.split_of(6, 2), attention.split_of(18, 2)) == (3, 1)
for family in ("llama", "qwen3"):
    for dtype in (torch.float32, torch.float16):
        found = trial.differences(kernels, small_config(family), dtype, torch.device("cpu"))
        print(family, dtype, found)
        assert max(found.values()) < (1e-5 if dtype == torch.float32 else 8e-3), found
"""

ENGINES = """
def made(ops):
    engine = Engine(small_decoder("qwen3", seed=32, tied=False), 40, slots=4, draft_tokens=3)
    engine.inference.kernels, engine.drafting.static = ops, True
    texts, seen = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6]], []
    for accepted in (3, 1):
        drafts = engine.draft(texts, 3)
        texts = [[*text, *draft[:accepted], 4] for text, draft in zip(texts, drafts)]
        seen.append(drafts)
    engine.static = True
    rows = engine.generate(texts[:2], Generation(3, top_k=2))
    return seen, [row.tokens for row in rows], torch.stack([row.topk_logprobs for row in rows])
from drafter.generation import Generator
Generator._room = lambda *_: 16
expected, found = made(None), made(kernels)
print(found)
assert found[:2] == expected[:2]
torch.testing.assert_close(found[2], expected[2], atol=1e-4, rtol=0)
"""


def run(trial: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SETTING + trial], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kernel_does_as_plain_torch() -> None:
    assert run(TRIAL).count("torch.float") == 4


def test_an_engine_drafts_and_generates_by_kernels_as_by_plain_torch() -> None:
    assert run(ENGINES)
