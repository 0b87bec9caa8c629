"""How the prompts of one group went in one arm."""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine_request_run import RequestRun


@dataclass(frozen=True, slots=True)
class GroupRun:
    """``total_s``: seconds spent in `Engine.step` from the first to the last, remains of prefill included. ``full_s``:
    those of them in which as many requests were in flight as ever may be; ``full_tokens`` came out in these. The end,
    in which one place after the other stays empty, says how long the slowest request runs on alone."""

    requests: tuple[RequestRun, ...]
    total_s: float
    full_s: float
    full_tokens: int

    @property
    def n_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests per second, while all places are taken."""
        return self.full_tokens / self.full_s if self.full_s > 0 else 0.0
