"""What is done to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["kill", "hang"]


@dataclass(frozen=True, slots=True)
class FaultsPlan:
    """Each of ``ways``, ``times`` times, with ``streams`` running over gRPC and as many over HTTP: "kill" is SIGKILL,
    "hang" is SIGSTOP, noticed by ``heartbeat_s`` seconds of silence. ``limit_s``: what it may take to serve again,
    beside the time to load the model, and that silence. ``hang_s``: a stream that has not ended by then never will.
    """

    ways: tuple[Way, ...] = ("kill", "hang")
    times: int = 2
    streams: int = 8
    max_tokens: int = 400
    heartbeat_s: float = 5.0
    limit_s: float = 5.0
    hang_s: float = 120.0
