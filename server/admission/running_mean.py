"""A mean that follows what it is told."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest value


class RunningMean:
    """``value`` is None until something was added."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """The newest value."""
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)
