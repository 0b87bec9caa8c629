"""Cost of a forward by rows and context: measured once, then refined by every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.control.params import DEFAULT_PARAMS, ControlParams


class MachineSpeed:
    """Relative deviation of present times from the measured grid, in two shares. Both drift on a shared machine, mostly
    together, because other processes slow down memory and arithmetic alike.

    A Kalman filter (Kalman 1960) of two values that follow a random walk with decay to 0. Each forward observes a
    mixture of the two.
    """

    def __init__(self, params: ControlParams = DEFAULT_PARAMS) -> None:
        self.reading = 0.0  # of the first row's time, which is mostly the reading of weights
        self.rows = 0.0  # of the time that further rows add, which is arithmetic
        self._params = params
        self._var_reading = self._var_rows = params.first_speed_spread**2
        self._covariance = params.first_speed_correlation * params.first_speed_spread**2

    def observe(self, first: float, more: float, expected: float, surprise: float) -> None:
        """Update from a forward that took ``expected`` * (1 + ``surprise``) milliseconds.

        first, more: milliseconds of its first row and of its other rows on the grid.
        """
        params, retention = self._params, self._params.speed_retention
        a, b = first / expected, more / expected
        walk = params.common_walk**2 + params.own_walk**2
        var_reading = retention**2 * self._var_reading + walk
        var_rows = retention**2 * self._var_rows + walk
        covariance = retention**2 * self._covariance + params.common_walk**2
        reading, rows = a * var_reading + b * covariance, a * covariance + b * var_rows
        total = a * reading + b * rows + params.timing_noise**2
        self.reading = self._bounded(retention * self.reading + reading / total * surprise)
        self.rows = self._bounded(retention * self.rows + rows / total * surprise)
        self._var_reading = var_reading - reading * reading / total
        self._var_rows = var_rows - rows * rows / total
        self._covariance = covariance - reading * rows / total

    def follow(self, reading: float, rows: float) -> None:
        """Change by the factors by which another forward's times on this machine changed."""
        self.reading = self._bounded((1.0 + self.reading) * reading - 1.0)
        self.rows = self._bounded((1.0 + self.rows) * rows - 1.0)

    def _bounded(self, speed: float) -> float:
        return max(self._params.min_speed, min(self._params.max_speed, speed))


class CostTable:
    """Milliseconds of a forward over ``rows`` rows that attend to ``context`` tokens each.

    A grid measured at start, scaled to the machine's present speed (`MachineSpeed`). Costs never fall with rows.

    rows, contexts: increasing grid points. ms: float [contexts, rows]. measured: False for a guess, which the first
    observation replaces. sizes: the increasing numbers of rows to which forwards are padded, so that a forward costs
    as much as one of the next size; empty: they are not padded.

    Raises:
        ValueError: the grid is empty or does not increase, or a cost is not positive or not finite.
    """

    def __init__(
        self,
        rows: Sequence[int],
        contexts: Sequence[int],
        ms: Sequence[Sequence[float]],
        measured: bool = True,
        params: ControlParams = DEFAULT_PARAMS,
        sizes: Sequence[int] = (),
    ) -> None:
        self._params, self._sizes = params, [int(size) for size in sizes]
        self._rows = [int(count) for count in rows]
        self._contexts = np.asarray(contexts, float)
        self._ms = np.asarray(ms, float)
        sound = (self._ms > 0) & np.isfinite(self._ms)
        if not self._ms.size or self._ms.shape != (len(contexts), len(rows)) or not sound.all():
            raise ValueError("ms: must be positive numbers, one row per context and one column per number of rows")
        if not all((np.diff(each) > 0).all() for each in (self._rows, self._contexts, self._sizes)):
            raise ValueError("rows, contexts, sizes: must rise")
        if self._rows[0] < 1 or not np.isfinite(self._contexts).all():
            raise ValueError("rows, contexts: must be numbers, rows from 1")
        # Noise only adds time: if more rows took less time, fewer rows can do so too.
        self._ms = np.minimum.accumulate(self._ms[:, ::-1], axis=1)[:, ::-1]
        self._speed = MachineSpeed(params)
        self.known = measured  # whether any forward was ever measured
        # Measured and present costs of the grid points by context step. Lists, since numpy reads single values slowly.
        self._grids: dict[int, list[float]] = {}
        self._present: dict[int, list[float]] = {}

    @staticmethod
    def guess(max_rows: int, first_ms: float = 10.0) -> CostTable:
        """A guess for an unmeasured machine. Observations correct it."""
        rows = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, max_rows} & set(range(1, max_rows + 1)))
        share = DEFAULT_PARAMS.guessed_row_share
        return CostTable(rows, [0], [[first_ms * (1 + share * (r - 1)) for r in rows]], measured=False)

    @staticmethod
    def from_dict(data: Mapping[str, Any], params: ControlParams = DEFAULT_PARAMS) -> CostTable:
        """The inverse of `as_dict`."""
        return CostTable(data["rows"], data["contexts"], data["ms"], data["measured"], params, data.get("sizes", ()))

    def as_dict(self) -> dict[str, Any]:
        """The grid as plain values, without the machine's present speed."""
        return {
            "rows": self._rows,
            "contexts": self._contexts.tolist(),
            "ms": self._ms.tolist(),
            "measured": self.known,
            "sizes": self._sizes,
        }

    def span(self, rows: int, more: int, context: float = 0) -> list[float]:
        """Milliseconds of ``rows`` up to ``rows`` + ``more`` rows, cut at the end of the grid; at least one value."""
        now, grid, last = self._now(context), self._rows, min(rows + more, self.largest)
        if rows >= self.largest:
            return [self.ms(rows, context)]
        if self._sizes:
            costs = []
            while rows <= last:
                size = self._padded(rows)
                costs += [self._at_rows(now, size)] * (min(size, last) + 1 - rows)
                rows = size + 1
            return costs
        costs = [now[0]] * (min(last + 1, grid[0]) - rows)
        for at, (low, high) in enumerate(pairwise(grid)):
            first, end = max(rows, low), min(last + 1, high)
            if first < end:
                slope = (now[at + 1] - now[at]) / (high - low)
                costs += [now[at] + slope * (count - low) for count in range(first, end)]
        return [*costs, now[-1]] if last == self.largest else costs

    def ms(self, rows: int, context: float = 0) -> float:
        """Expected milliseconds; beyond the grid, proportional to rows."""
        return self._at_rows(self._now(context), self._padded(rows))

    def row_ms(self, rows: int, context: float = 0) -> float:
        """Milliseconds of a further row beside ``rows``, averaged over a few, as if forwards were not padded."""
        now, further = self._now(context), self._params.row_price_rows
        return (self._at_rows(now, rows + further) - self._at_rows(now, rows)) / further

    @property
    def largest(self) -> int:
        """Largest measured number of rows."""
        return self._rows[-1]

    def observe(self, rows: int, context: float, ms: float) -> None:
        """Update from a forward that took ``ms``."""
        if rows < 1 or ms <= 0:
            return
        if not self.known:  # the first measurement replaces the guess
            self.scale_to(rows, context, ms)
            return
        expected, grid = self.ms(rows, context), self._grid(context)
        limit = self._params.max_log_surprise
        surprise = max(-limit, min(limit, math.log(ms / expected)))
        more = max(self._at_rows(grid, self._padded(rows)) - grid[0], 0.0)
        self._speed.observe(grid[0], more, expected, surprise)
        self._present.clear()

    @property
    def slowdown(self) -> tuple[float, float]:
        """Present over measured time of the first row, and of further rows."""
        return 1.0 + self._speed.reading, 1.0 + self._speed.rows

    def follow(self, before: tuple[float, float], now: tuple[float, float]) -> None:
        """Change as the table of another forward did, since this one did not run.

        before, now: `slowdown` of that table before and after its observation.
        """
        if now != before:
            self._speed.follow(now[0] / before[0], now[1] / before[1])
            self._present.clear()

    def scale_to(self, rows: int, context: float, ms: float) -> None:
        """Scale the grid so that a forward of this size costs ``ms``."""
        self.known = True
        self._ms = self._ms * (ms / self.ms(rows, context))
        self._grids.clear()
        self._present.clear()

    def _padded(self, rows: int) -> int:
        """Rows that a forward of ``rows`` computes."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else rows

    def _at_rows(self, costs: Sequence[float], rows: int) -> float:
        """Cost of ``rows`` rows, interpolated between the grid points' ``costs``."""
        grid = self._rows
        right = bisect_left(grid, rows)
        if right == len(grid):
            return costs[-1] * rows / self.largest
        if right == 0 or grid[right] == rows:
            return costs[right]
        share = (rows - grid[right - 1]) / (grid[right] - grid[right - 1])
        return costs[right - 1] + (costs[right] - costs[right - 1]) * share

    def _now(self, context: float) -> list[float]:
        """Present milliseconds of the grid points, increasing."""
        key = round(context / self._params.context_step)
        found = self._present.get(key)
        if found is None:
            grid, speed = self._grid(context), self._speed
            slope, shift = 1.0 + speed.rows, grid[0] * (speed.reading - speed.rows)
            found = self._present[key] = [cost * slope + shift for cost in grid]
        return found

    def _grid(self, context: float) -> list[float]:
        """Measured milliseconds of the grid points."""
        key = round(context / self._params.context_step)
        found = self._grids.get(key)
        if found is None:
            found = self._grids[key] = list(accumulate(self._at(key * self._params.context_step).tolist(), max))
        return found

    def _at(self, context: float) -> NDArray[np.float64]:
        """Measured costs at ``context``; beyond the last grid point they grow linearly, as attention does."""
        if len(self._contexts) == 1:
            return self._ms[0]
        low = int(np.clip(np.searchsorted(self._contexts, context) - 1, 0, len(self._contexts) - 2))
        slope = (self._ms[low + 1] - self._ms[low]) / (self._contexts[low + 1] - self._contexts[low])
        if context > self._contexts[-1]:
            return self._ms[-1] + np.maximum(slope, 0.0) * (context - self._contexts[-1])
        return self._ms[low] + slope * (max(context, self._contexts[0]) - self._contexts[low])
