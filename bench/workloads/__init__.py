"""Real prompts for benchmarks. Imports nothing: the command line reads the names."""

from __future__ import annotations

WORKLOAD_NAMES = ("humaneval", "edit", "fim", "typing", "chat", "concurrent", "mixed")
MIXES = ("humaneval", "chat", "mixed", "edit")  # of concurrent prompts
FETCHED_NAMES = ("next_edit",)  # made from packages that the first use fetches
CONCURRENT_NAMES = tuple(f"concurrent/{mix}" for mix in MIXES)
EDIT_ROADS = ("predict-edit", "completions", "llama.cpp")  # of `specdec bench edits`
