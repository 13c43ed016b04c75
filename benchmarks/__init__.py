"""Benchmarks: numbers side by side in one run, written to results/ with machine and versions."""
