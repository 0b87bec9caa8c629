"""How much longer than measured a forward takes at present, apart for reading weights and for the work of rows."""

from __future__ import annotations

KEEP = 0.998  # of what is known, from one observation to the next: what is not seen any more comes back to the grid
# Standard deviations of one observation's change, as shares of the measured time: of both together, and of each apart.
COMMON_WALK, OWN_WALK = 0.03, 0.01
NOISE = 0.1  # of one observation's time
FIRST_SPREAD = 0.05  # of both, when the grid has just been measured
FIRST_TOGETHER = 0.8  # correlation of the two then
LEAST, MOST = -0.8, 8.0


class MachineSpeed:
    """Two shares by which the measured times are off: of the first row's time, which is mostly the reading of weights,
    and of what more rows add to it, which is arithmetic. On a shared machine both drift, mostly together: what slows it
    down is somebody else's work. They also drift apart, since memory and processors are shared by different others.

    A Kalman filter (Kalman 1960) of two values that walk at random and are drawn back to 0; each forward tells a
    mixture of the two. So forwards of one size say little about those of another, and what they leave open is shared
    out as the two are used to move.
    """

    def __init__(self) -> None:
        self._reading = self._rows = 0.0
        self._var_reading = self._var_rows = FIRST_SPREAD**2
        self._together = FIRST_TOGETHER * FIRST_SPREAD**2  # covariance

    def extra(self, first: float, more: float) -> float:
        """Milliseconds beyond the grid's, of a forward whose first row takes ``first`` there, the others ``more``."""
        return self._reading * first + self._rows * more

    def observe(self, first: float, more: float, expected: float, surprise: float, besides: float = 0.0) -> float:
        """A forward that was expected to take ``expected`` took longer by the share ``surprise`` of that. ``besides``:
        variance of what else that may have been. Returns the surprise's own variance."""
        a, b = first / expected, more / expected
        walk = COMMON_WALK**2 + OWN_WALK**2
        var_reading = KEEP * KEEP * self._var_reading + walk
        var_rows = KEEP * KEEP * self._var_rows + walk
        together = KEEP * KEEP * self._together + COMMON_WALK**2
        reading, rows = a * var_reading + b * together, a * together + b * var_rows
        total = a * reading + b * rows + besides + NOISE**2
        self._reading = _within(KEEP * self._reading + reading / total * surprise)
        self._rows = _within(KEEP * self._rows + rows / total * surprise)
        self._var_reading = var_reading - reading * reading / total
        self._var_rows = var_rows - rows * rows / total
        self._together = together - reading * rows / total
        return total


def _within(share: float) -> float:
    return max(LEAST, min(MOST, share))
