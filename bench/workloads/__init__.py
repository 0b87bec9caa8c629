"""Real prompts for benchmarks. Imports nothing: the command line reads the names."""

from __future__ import annotations

CONCURRENT_NAMES = ("concurrent/humaneval", "concurrent/chat", "concurrent/mixed", "concurrent/edit")
SINGLE_NAMES = ("humaneval", "edit", "fim", "typing", "chat", "mixed")  # one prompt after the other
WORKLOAD_NAMES = SINGLE_NAMES + CONCURRENT_NAMES
FETCHED_NAMES = ("next_edit",)  # made from packages that the first use fetches
EDIT_ROADS = ("predict-edit", "completions", "llama.cpp")  # of `specdec bench edits`
