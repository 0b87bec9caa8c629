"""What the statistics say about one number of two arms."""

from __future__ import annotations

from typing import Protocol

from server.experiment.stats.interval import Interval


class Comparison(Protocol):
    """One statistic of both arms, and how far apart the arms may be."""

    @property
    def a(self) -> float:
        """The control's."""

    @property
    def b(self) -> float:
        """The treatment's."""

    def ratio(self, alpha: float) -> Interval:
        """Interval of level 1 - alpha for B / A."""

    def difference(self, alpha: float) -> Interval:
        """Interval of level 1 - alpha for B - A."""

    def p_value(self) -> float:
        """Two-sided, for A = B; consistent with the intervals."""
