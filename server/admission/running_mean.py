"""A mean that follows what it is told."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest value


class RunningMean:
    """``value`` is None until something was added; of the first values it is the mean, until one has no more than
    ``weight``."""

    def __init__(self, weight: float = WEIGHT) -> None:
        self.value: float | None = None
        self._weight, self._count = weight, 0

    def add(self, value: float) -> None:
        """The newest value."""
        self._count += 1
        old = 0.0 if self.value is None else self.value
        self.value = old + max(self._weight, 1 / self._count) * (value - old)
