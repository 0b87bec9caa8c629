"""Load tests of a running server: specdec, or any server with OpenAI's API.

Imports nothing: the command line reads the names.
"""

from __future__ import annotations

SERVE_WORKLOADS = ("humaneval", "edit", "fim", "typing", "chat", "shared-prefix", "mixed")
ARRIVALS = ("constant", "poisson", "gamma")
