"""Benchmarks: every figure a ratio or a median within one run, on real prompts."""
