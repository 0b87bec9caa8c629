"""How long until a place in the queue comes free."""

from __future__ import annotations

MIN_RETRY_S = 0.1
UNKNOWN_RETRY_S = 1.0
WEIGHT = 0.2  # of the newest interval in the running mean


class RetryEstimate:
    """Running mean of the time between completions while there is work; idle time does not count."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._mark_s = 0.0

    def start(self, now: float) -> None:
        """Work arrives at an idle scheduler (monotonic seconds)."""
        self._mark_s = now

    def completed(self, now: float) -> None:
        """A running sequence ended."""
        interval = max(0.0, now - self._mark_s)
        self._mark_s = now
        self._mean_s = interval if self._mean_s is None else self._mean_s + WEIGHT * (interval - self._mean_s)

    def retry_after_s(self) -> float:
        """Seconds a refused client should wait: one mean interval, at least 0.1."""
        return max(MIN_RETRY_S, UNKNOWN_RETRY_S if self._mean_s is None else self._mean_s)
