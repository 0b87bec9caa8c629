"""What a forward costs by rows and context: measured once, then refined by every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIP = 0.25  # log of the largest surprise one observation may claim: an outlier is somebody else's process
LEAST_SHARE = 0.2  # of the grid's cost that no speed goes below
CONTEXT_STEP = 128  # curves are kept for multiples of this
KEEP = 0.998  # of the speed that is known, from one observation to the next: what is not seen comes back to the grid
# Standard deviations of one observation's change, as shares of the measured time: of both together, and of each apart.
COMMON_WALK, OWN_WALK = 0.025, 0.02
NOISE = 0.1  # of one observation's time
FIRST_SPREAD = 0.05  # of both, when the grid has just been measured
FIRST_TOGETHER = 0.8  # correlation of the two then
LEAST, MOST = -0.8, 8.0


class MachineSpeed:
    """Two shares by which the measured times are off: ``reading``, of the first row's time, which is mostly the reading
    of weights, and ``rows``, of what more rows add to it, which is arithmetic. On a shared machine both drift, mostly
    together, since what slows it down is somebody else's work.

    A Kalman filter (Kalman 1960) of two values that walk at random and are drawn back to 0; each forward tells a
    mixture of the two, and what forwards of one size leave open is shared out as the two are used to move.
    """

    def __init__(self) -> None:
        self.reading = self.rows = 0.0
        self._var_reading = self._var_rows = FIRST_SPREAD**2
        self._together = FIRST_TOGETHER * FIRST_SPREAD**2  # covariance

    def observe(self, first: float, more: float, expected: float, surprise: float) -> None:
        """A forward that was expected to take ``expected`` took longer by the share ``surprise`` of that. first, more:
        what its first row and the others take on the grid."""
        a, b = first / expected, more / expected
        walk = COMMON_WALK**2 + OWN_WALK**2
        var_reading = KEEP * KEEP * self._var_reading + walk
        var_rows = KEEP * KEEP * self._var_rows + walk
        together = KEEP * KEEP * self._together + COMMON_WALK**2
        reading, rows = a * var_reading + b * together, a * together + b * var_rows
        total = a * reading + b * rows + NOISE**2
        self.reading = max(LEAST, min(MOST, KEEP * self.reading + reading / total * surprise))
        self.rows = max(LEAST, min(MOST, KEEP * self.rows + rows / total * surprise))
        self._var_reading = var_reading - reading * reading / total
        self._var_rows = var_rows - rows * rows / total
        self._together = together - reading * rows / total


class CostTable:
    """Milliseconds of a forward over ``rows`` rows that look back on ``context`` tokens each.

    A grid measured at start, at the machine's present speed (`MachineSpeed`). Costs never fall with rows.

    rows, contexts: rising grid points. ms: float [contexts, rows]. measured: False for a guess, which the first
    observation replaces.

    Raises:
        ValueError: the grid is empty or does not rise, or a cost is not positive or not finite.
    """

    def __init__(
        self, rows: Sequence[int], contexts: Sequence[int], ms: Sequence[Sequence[float]], measured: bool = True
    ) -> None:
        self._rows = [int(count) for count in rows]
        self._contexts = np.asarray(contexts, float)
        self._ms = np.asarray(ms, float)
        sound = (self._ms > 0) & np.isfinite(self._ms)
        if not self._ms.size or self._ms.shape != (len(contexts), len(rows)) or not sound.all():
            raise ValueError("ms: must be positive numbers, one row per context and one column per number of rows")
        if not ((np.diff(self._rows) > 0).all() and (np.diff(self._contexts) > 0).all()):
            raise ValueError("rows, contexts: must rise")
        if self._rows[0] < 1 or not np.isfinite(self._contexts).all():
            raise ValueError("rows, contexts: must be numbers, rows from 1")
        # Noise only ever adds: what more rows did in less time, fewer rows can do as well.
        self._ms = np.minimum.accumulate(self._ms[:, ::-1], axis=1)[:, ::-1]
        self._speed = MachineSpeed()
        self.known = measured  # whether anything was ever measured
        self._measured = measured
        # By context the grid's costs, and what they are at present; lists: numpy looks one value up slowly.
        self._grids: dict[int, list[float]] = {}
        self._present: dict[int, list[float]] = {}

    @staticmethod
    def guess(max_rows: int, first_ms: float = 10.0) -> CostTable:
        """A table for a machine nobody measured: a forward whose rows add 3 % each. Observations correct it."""
        rows = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, max_rows} & set(range(1, max_rows + 1)))
        return CostTable(rows, [0], [[first_ms * (1 + 0.03 * (r - 1)) for r in rows]], measured=False)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CostTable:
        """The inverse of `as_dict`."""
        return CostTable(data["rows"], data["contexts"], data["ms"], data["measured"])

    def as_dict(self) -> dict[str, Any]:
        """The grid, without what was learnt of the machine's speed since."""
        return {
            "rows": self._rows,
            "contexts": self._contexts.tolist(),
            "ms": self._ms.tolist(),
            "measured": self._measured,
        }

    def span(self, rows: int, more: int, context: float = 0) -> list[float]:
        """Milliseconds of ``rows`` rows and of up to ``more`` more, as far as the grid reaches; of one at least."""
        now, grid, last = self._now(context), self._rows, min(rows + more, self.largest)
        if rows >= self.largest:
            return [self.ms(rows, context)]
        costs = [now[0]] * (min(last + 1, grid[0]) - rows)
        for at, (low, high) in enumerate(pairwise(grid)):
            first, end = max(rows, low), min(last + 1, high)
            if first < end:
                slope = (now[at + 1] - now[at]) / (high - low)
                costs += [now[at] + slope * (count - low) for count in range(first, end)]
        return [*costs, now[-1]] if last == self.largest else costs

    def ms(self, rows: int, context: float = 0) -> float:
        """Expected milliseconds; beyond the grid, in proportion."""
        return self._at_rows(self._now(context), rows)

    @property
    def slowness(self) -> float:
        """How many times as long as measured a forward of one row takes at present."""
        return 1.0 + self._speed.reading

    @property
    def largest(self) -> int:
        """Most rows that were measured."""
        return self._rows[-1]

    def observe(self, rows: int, context: float, ms: float) -> None:
        """A forward took ``ms``."""
        if rows < 1 or ms <= 0:
            return
        if not self.known:  # it tells what no measurement did: it is taken whole
            self.scale_to(rows, context, ms)
            return
        expected, grid = self.ms(rows, context), self._grid(context)
        surprise = max(-CLIP, min(CLIP, math.log(ms / expected)))
        self._speed.observe(grid[0], max(self._at_rows(grid, rows) - grid[0], 0.0), expected, surprise)
        self._present.clear()

    def scale_to(self, rows: int, context: float, ms: float) -> None:
        """Scale the whole grid so that such a forward is expected to take ``ms``."""
        self.known = True
        self._ms = self._ms * (ms / self.ms(rows, context))
        self._grids.clear()
        self._present.clear()

    def _at_rows(self, costs: Sequence[float], rows: int) -> float:
        """Of ``rows`` rows, where the grid's points cost ``costs``."""
        grid = self._rows
        right = bisect_left(grid, rows)
        if right == len(grid):
            return costs[-1] * rows / self.largest
        if right == 0 or grid[right] == rows:
            return costs[right]
        share = (rows - grid[right - 1]) / (grid[right] - grid[right - 1])
        return costs[right - 1] + (costs[right] - costs[right - 1]) * share

    def _now(self, context: float) -> list[float]:
        """Milliseconds of the grid's points at present; they rise."""
        key = round(context / CONTEXT_STEP)
        found = self._present.get(key)
        if found is None:
            grid, speed = self._grid(context), self._speed
            slope, shift = 1.0 + speed.rows, grid[0] * (speed.reading - speed.rows)
            found = self._present[key] = [max(cost * slope + shift, LEAST_SHARE * cost) for cost in grid]
        return found

    def _grid(self, context: float) -> list[float]:
        """Milliseconds of the grid's points as they were measured."""
        key = round(context / CONTEXT_STEP)
        found = self._grids.get(key)
        if found is None:
            found = self._grids[key] = list(accumulate(self._at(key * CONTEXT_STEP).tolist(), max))
        return found

    def _at(self, context: float) -> NDArray[np.float64]:
        """The measured costs at ``context``; beyond the last one attention grows in proportion."""
        if len(self._contexts) == 1:
            return self._ms[0]
        low = int(np.clip(np.searchsorted(self._contexts, context) - 1, 0, len(self._contexts) - 2))
        slope = (self._ms[low + 1] - self._ms[low]) / (self._contexts[low + 1] - self._contexts[low])
        if context > self._contexts[-1]:
            return self._ms[-1] + np.maximum(slope, 0.0) * (context - self._contexts[-1])
        return self._ms[low] + slope * (max(context, self._contexts[0]) - self._contexts[low])
