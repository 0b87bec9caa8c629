"""How the prompts of one group went in one arm."""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine_request_run import RequestRun


@dataclass(frozen=True, slots=True)
class GroupRun:
    """``total_s``: seconds spent in `Engine.step` from the first to the last, remains of prefill included."""

    requests: tuple[RequestRun, ...]
    total_s: float

    @property
    def n_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests per second of the whole run."""
        return self.n_tokens / self.total_s if self.total_s > 0 else 0.0
