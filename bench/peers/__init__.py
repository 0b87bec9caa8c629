"""The same prompts to specdec and to other engines, in turns. Imports nothing: the command line reads the names."""

from __future__ import annotations

PEER_WORKLOADS = ("humaneval", "edit", "fim", "chat")
ENGINES = ("specdec", "llama.cpp", "vllm")
