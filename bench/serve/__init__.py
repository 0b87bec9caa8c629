"""Load on a running server, ours or any with OpenAI's API: who asks when, and how long answers take.

This module stays light: the command line reads the names from it.
"""

from __future__ import annotations

SERVE_WORKLOADS = ("humaneval", "edit", "fim", "typing", "chat", "shared-prefix", "mixed")
ARRIVALS = ("constant", "poisson", "gamma")
