"""Real prompts to measure an engine on. This module stays light: the command line reads the names from it."""

from __future__ import annotations

WORKLOAD_NAMES = ("humaneval", "edit", "fim", "typing", "chat", "concurrent", "mixed")
MIXES = ("humaneval", "chat", "mixed", "edit")  # of prompts that are asked several at a time
CONCURRENT_NAMES = tuple(f"concurrent/{mix}" for mix in MIXES)
