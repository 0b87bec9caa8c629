"""An interval of plausible values."""

from __future__ import annotations

import math
from typing import NamedTuple


class Interval(NamedTuple):
    """From ``low`` to ``high``, both included; infinite where the data bound nothing."""

    low: float
    high: float

    def inside(self, low: float, high: float) -> bool:
        """Whether all of it lies strictly between the two."""
        return low < self.low and self.high < high

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


EVERYTHING = Interval(-math.inf, math.inf)
ANY_RATIO = Interval(0.0, math.inf)
