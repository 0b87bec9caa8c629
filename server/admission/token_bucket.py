"""A rate limit that lets bursts through."""

from __future__ import annotations


class TokenBucket:
    """Fills at ``per_minute`` a minute and holds a minute's worth, full to begin with.

    It may be overdrawn, since what a call takes is known only afterwards: whoever comes next waits for that. Times are
    monotonic seconds and never run back.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._level, self._at = self._capacity, now

    @property
    def per_minute(self) -> float:
        """The rate."""
        return self._per_minute

    def change(self, per_minute: float, now: float) -> None:
        """Another rate from now on; what was overdrawn stays so."""
        self._fill(now)
        self._per_minute = per_minute
        self._level = min(self._level, self._capacity)

    def wait_s(self, now: float) -> float:
        """Seconds until something may be taken again; 0: now."""
        self._fill(now)
        return max(0.0, 1.0 - self._level) * 60.0 / self._per_minute

    def take(self, amount: float, now: float) -> None:
        """Use ``amount``, whether or not it is there."""
        self._fill(now)
        self._level -= amount

    @property
    def _capacity(self) -> float:
        return max(1.0, self._per_minute)

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_minute / 60.0)
        self._at = now
