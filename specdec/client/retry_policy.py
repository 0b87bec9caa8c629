"""When a failed call is tried again."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from specdec.client.call_error import CallError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``attempts`` in all. A server that says when to come back is taken at its word, unless that is later than
    ``longest_s``; else the pause is ``first_s`` seconds and doubles. ``unreachable``: also try again where no server
    answers. Pauses are drawn up to ``jitter`` longer, so that many clients do not come back at once."""

    attempts: int = 4
    first_s: float = 0.2
    longest_s: float = 30.0
    jitter: float = 0.25
    unreachable: bool = True

    def pause_s(self, error: CallError, attempt: int, draw: float) -> float | None:
        """Seconds until the next try after ``attempt`` of them (from 1), None: there is none. draw: in [0, 1)."""
        if attempt >= self.attempts:
            return None
        hint = error.retry_after_s
        if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            if hint is None:
                return None  # what does not fit will not fit later
        elif error.code != grpc.StatusCode.UNAVAILABLE or not (error.reached or self.unreachable):
            return None
        pause = self.first_s * 2.0 ** (attempt - 1) if hint is None else hint
        return None if pause > self.longest_s else pause * (1.0 + self.jitter * draw)
