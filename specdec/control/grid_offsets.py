"""How far single points of a measured grid are off, beside what the machine's speed explains."""

from __future__ import annotations

import math

SPREAD = 0.05  # standard deviation of an offset nobody has looked at: what one may be wrong by
WALK = 0.01  # of an offset's change from one observation to the next
MOST = 1.5
Near = list[tuple[int, float]]  # grid points and their shares in a number of rows


class GridOffsets:
    """Per grid point the log of what it truly takes over what it is thought to, and how sure that is.

    A scalar Kalman filter (Kalman 1960) for each of ``points``, without the covariances between them: one that was not
    seen for long is less sure, so that a single look at it says much; one that is seen all the time moves slowly.
    """

    def __init__(self, points: int) -> None:
        self._values = [0.0] * points
        self.factors = [1.0] * points  # exp of the values
        self._variances = [SPREAD**2] * points

    def weights(self) -> list[float]:
        """Inverse variances, float [points]: how much each value is worth against its neighbours'."""
        return [1.0 / variance for variance in self._variances]

    def variance(self, near: Near) -> float:
        """Of the mean of some points; ``near`` each other."""
        return sum(share * share * self._variances[at] for at, share in near)

    def observe(self, near: Near, surprise: float, total: float) -> None:
        """The mean of the points ``near`` was off by ``surprise``, a log, whose variance is ``total``."""
        self._variances = [min(SPREAD**2, variance + WALK**2) for variance in self._variances]
        for at, share in near:
            gain = share * self._variances[at] / total
            self._values[at] = max(-MOST, min(MOST, self._values[at] + gain * surprise))
            self.factors[at] = math.exp(self._values[at])
            self._variances[at] *= 1.0 - gain * share
