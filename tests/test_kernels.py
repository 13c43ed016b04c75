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
from drafter import attention, kernels
for family in ("llama", "qwen3"):
    for dtype in (torch.float32, torch.float16):
        error = attention.difference(kernels.attend_one, small_config(family), dtype, torch.device("cpu"))
        print(family, dtype, error)
        assert error < (1e-5 if dtype == torch.float32 else 4e-3)
"""


def test_attention_of_one_token_a_row() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TRIAL], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("torch.float") == 4
