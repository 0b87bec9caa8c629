"""Benchmarks on real prompts. Every figure is a ratio or a median within one run."""
