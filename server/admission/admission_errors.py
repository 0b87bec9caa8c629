"""Refusals at admission. Each but the last tells when to come back."""

from __future__ import annotations

from specdec.errors import QueueFullError, RequestError

MIN_RETRY_S = 0.1


class RateLimitedError(RequestError):
    """The key has used up one of its limits. ``limit`` is that limit's field, ``value`` what it allows."""

    reason = "RATE_LIMITED"

    def __init__(self, key: str, limit: str, value: float, retry_after_s: float) -> None:
        self.key, self.limit, self.value = key, limit, value
        self.retry_after_s = max(MIN_RETRY_S, retry_after_s)
        super().__init__(f"key {key!r} allows {limit} {value:g}; retry in {self.retry_after_s:.1f} s")


class TokenQueueFullError(QueueFullError):
    """Too many prompt tokens wait already."""

    def __init__(self, limit: int, waiting: int, retry_after_s: float) -> None:
        super().__init__(limit, max(MIN_RETRY_S, retry_after_s))
        self.args = (
            f"queue is full: {waiting} prompt tokens wait and at most {limit} may; retry in {self.retry_after_s:.1f} s",
        )


class LateError(RequestError):
    """As fast as things go, the request would not be done by its deadline. Times are seconds from now."""

    reason = "DEADLINE_UNATTAINABLE"

    def __init__(self, needed_s: float, deadline_s: float, retry_after_s: float) -> None:
        self.needed_s, self.deadline_s = needed_s, deadline_s
        self.retry_after_s = max(MIN_RETRY_S, retry_after_s)
        super().__init__(
            f"done in about {needed_s:.1f} s at the present rate, but the deadline is in {deadline_s:.1f} s; retry in "
            f"{self.retry_after_s:.1f} s, allow more time or ask for fewer tokens"
        )


class SupersededError(RequestError):
    """A newer request of the same tenant and ``supersedes_key`` took this one's place."""

    reason = "SUPERSEDED"

    def __init__(self) -> None:
        super().__init__("a newer request with the same supersedes_key took this one's place")
