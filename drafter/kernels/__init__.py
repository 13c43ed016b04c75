"""Triton kernels for a GPU. Each has a counterpart in plain.py, which a trial at start-up holds it to."""

from drafter.kernels.attention import attend, turned
from drafter.kernels.products import product
from drafter.kernels.sums import add_norm, gated

__all__ = ["add_norm", "attend", "gated", "product", "turned"]
