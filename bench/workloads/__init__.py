"""Real prompts for benchmarks. Imports nothing: the command line reads the names."""

from __future__ import annotations

WORKLOAD_NAMES = ("humaneval", "edit", "fim", "typing", "chat", "concurrent", "mixed")
MIXES = ("humaneval", "chat", "mixed", "edit")  # of concurrent prompts
CONCURRENT_NAMES = tuple(f"concurrent/{mix}" for mix in MIXES)
