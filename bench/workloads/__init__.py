"""Real prompts to measure an engine on. This module stays light: the command line reads the names from it."""

from __future__ import annotations

WORKLOAD_NAMES = ("humaneval", "edit", "fim", "typing", "chat", "concurrent", "mixed")
