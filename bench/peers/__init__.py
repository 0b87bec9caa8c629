"""The same prompts to other engines and to ours, in turns. Stays light: the command line reads the names from it."""

from __future__ import annotations

PEER_WORKLOADS = ("humaneval", "edit", "fim", "chat")
ENGINES = ("specdec", "llama.cpp", "vllm", "transformers")
