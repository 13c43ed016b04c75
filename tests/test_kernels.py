"""Triton's kernels, run by its interpreter on the CPU, against plain torch."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")

TRIAL = """
import sys, torch
from triton.runtime import interpreter
plain = interpreter._patch_lang_tensor
def patched(tensor, *arguments):  # numpy no longer turns an array of one number into an index
    plain(tensor, *arguments)
    tensor.__index__ = lambda self: int(self.handle.data.item())
interpreter._patch_lang_tensor = patched
sys.path.insert(0, "tests")
from conftest import small_config
from drafter import kernels, trial
trial.MANY, trial.ROWS = 1, trial.ROWS[:6]
for family, dtype, kernels.SPLITS in (("llama", torch.float32, 3), ("qwen3", torch.float16, 3),
                                      ("llama", torch.float16, 1), ("qwen3", torch.float32, 1)):
        found = trial.differences(kernels, small_config(family), dtype, torch.device("cpu"))
        print(family, dtype, found)
        assert max(found.values()) < (1e-5 if dtype == torch.float32 else 8e-3), found
"""


def test_every_kernel_does_as_plain_torch() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TRIAL], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("torch.float") == 4
