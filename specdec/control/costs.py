"""What a forward costs by rows and context: measured once, then refined by every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


SPREAD = 0.05  # standard deviation of an offset nobody has looked at: what one may be wrong by
WALK = 0.01  # of an offset's change from one observation to the next
MOST_OFFSET = 1.5
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
            self._values[at] = max(-MOST_OFFSET, min(MOST_OFFSET, self._values[at] + gain * surprise))
            self.factors[at] = math.exp(self._values[at])
            self._variances[at] *= 1.0 - gain * share


CLIP = 0.25  # log of the largest surprise one observation may claim: an outlier is somebody else's process
LEAST_SHARE = 0.2  # of the grid's cost that no speed goes below
CONTEXT_STEP = 128  # curves are kept for multiples of this


class CostTable:
    """Milliseconds of a forward over ``rows`` rows that look back on ``context`` tokens each.

    A grid measured at start, at the machine's present speed (`MachineSpeed`), times exp(offset) of its points
    (`GridOffsets`): what the speed leaves unexplained about a number of rows. An observation is clipped, and shared out
    between the two by how unsure each is. Costs never fall with rows.

    rows, contexts: rising grid points. ms: float [contexts, rows]. measured: False for a guess, which the first
    observation replaces.

    Raises:
        ValueError: the grid does not rise, or a cost is not positive.
    """

    def __init__(
        self, rows: Sequence[int], contexts: Sequence[int], ms: Sequence[Sequence[float]], measured: bool = True
    ) -> None:
        self._rows = np.asarray(rows, float)
        self._grid_rows = [int(count) for count in rows]
        self._contexts = np.asarray(contexts, float)
        self._ms = np.asarray(ms, float)
        if self._ms.shape != (len(contexts), len(rows)) or not (self._ms > 0).all():
            raise ValueError("ms: must be positive, one row per context and one column per number of rows")
        if (np.diff(self._rows) <= 0).any() or (np.diff(self._contexts) <= 0).any():
            raise ValueError("rows, contexts: must rise")
        # Noise only ever adds: what more rows did in less time, fewer rows can do as well.
        self._ms = np.minimum.accumulate(self._ms[:, ::-1], axis=1)[:, ::-1]
        self._offsets = GridOffsets(len(rows))
        self._speed = MachineSpeed()
        # Per context the grid's costs, and what they are at present; lists, in which one value is looked up quickly.
        self._grids: dict[int, list[float]] = {}
        self._present: dict[int, list[float]] = {}
        self._observed, self._measured = 0, measured

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
        """The measured grid, without what was learnt since."""
        return {
            "rows": self._rows.tolist(),
            "contexts": self._contexts.tolist(),
            "ms": self._ms.tolist(),
            "measured": self._measured,
        }

    def span(self, rows: int, more: int, context: float = 0) -> list[float]:
        """Milliseconds of ``rows`` rows and of up to ``more`` more, as far as the grid reaches; of one at least."""
        now, grid, last = self._now(context), self._grid_rows, min(rows + more, self.largest)
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
        now = self._now(context)
        return now[-1] * rows / self.largest if rows > self.largest else _mean(now, self._near(rows))

    @property
    def largest(self) -> int:
        """Most rows that were measured."""
        return self._grid_rows[-1]

    @property
    def slowness(self) -> float:
        """How many times as long as measured a forward of one row takes at present."""
        return 1.0 + self._speed.extra(1.0, 0.0)

    @property
    def known(self) -> bool:
        """Whether anything was ever measured."""
        return self._measured or self._observed > 0

    def observe(self, rows: int, context: float, ms: float) -> None:
        """A forward took ``ms``."""
        if rows < 1 or ms <= 0:
            return
        expected = self.ms(rows, context)
        self._observed += 1
        if self._observed == 1 and not self._measured:  # it tells what no measurement did: take it whole
            self._ms = self._ms * (ms / expected)
            self._grids.clear()
            self._present.clear()
            return
        near, grid = self._near(rows), self._at(context)
        surprise = max(-CLIP, min(CLIP, math.log(ms / expected)))
        first, whole = grid[0], _mean(grid, near) * max(1.0, rows / self.largest)
        besides = self._offsets.variance(near)
        total = self._speed.observe(first, max(whole - first, 0.0), expected, surprise, besides)
        self._offsets.observe(near, surprise, total)
        self._present.clear()

    def _near(self, rows: int) -> Near:
        """The grid points next to ``rows``, the lower one first."""
        right = bisect_left(self._grid_rows, rows)
        if right == len(self._grid_rows):
            return [(right - 1, 1.0)]
        if right == 0 or self._grid_rows[right] == rows:
            return [(right, 1.0)]
        low, high = self._grid_rows[right - 1], self._grid_rows[right]
        share = (rows - low) / (high - low)
        return [(right - 1, 1.0 - share), (right, share)]

    def _now(self, context: float) -> list[float]:
        """Milliseconds of the grid's points at present; they rise."""
        key = round(context / CONTEXT_STEP)
        found = self._present.get(key)
        if found is None:
            grid = self._at(context)
            # c + extra(first, c - first), which is linear.
            rows = self._speed.extra(0.0, 1.0)
            slope, shift = 1.0 + rows, grid[0] * (self._speed.extra(1.0, 0.0) - rows)
            costs = [
                max(c * slope + shift, LEAST_SHARE * c) * factor
                for c, factor in zip(grid, self._offsets.factors, strict=True)
            ]
            if any(more < less for less, more in pairwise(costs)):
                costs = rising(costs, self._offsets.weights())
            found = self._present[key] = costs
        return found

    def _at(self, context: float) -> list[float]:
        """Milliseconds of the grid's points as they were measured."""
        key = round(context / CONTEXT_STEP)
        found = self._grids.get(key)
        if found is None:
            found = self._grids[key] = self._grid(key * CONTEXT_STEP).tolist()
        return found

    def _grid(self, context: float) -> NDArray[np.float64]:
        """The measured costs at ``context``; beyond the last one attention grows in proportion."""
        if len(self._contexts) == 1:
            return self._ms[0]
        low = int(np.clip(np.searchsorted(self._contexts, context) - 1, 0, len(self._contexts) - 2))
        slope = (self._ms[low + 1] - self._ms[low]) / (self._contexts[low + 1] - self._contexts[low])
        if context > self._contexts[-1]:
            return self._ms[-1] + np.maximum(slope, 0.0) * (context - self._contexts[-1])
        return self._ms[low] + slope * (max(context, self._contexts[0]) - self._contexts[low])


def _mean(values: Sequence[float], near: Near) -> float:
    (last, share), low = near[-1], values[near[0][0]]
    return low if len(near) == 1 else low + (values[last] - low) * share


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest rising sequence in the weighted least-squares sense (pool adjacent violators)."""
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while means and means[-1] > mean:
            other = sums.pop()
            mean = (means.pop() * other + mean * total) / (other + total)
            total += other
            count += counts.pop()
        means.append(mean)
        sums.append(total)
        counts.append(count)
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]
