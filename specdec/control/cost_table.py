"""What a forward costs by rows and context: measured once, then refined by every step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.control.machine_speed import MachineSpeed

SHAPE = 0.04  # weight of one observation in the cost of its number of rows against the others
CLIP = 0.25  # log of the largest surprise one observation may claim: an outlier is somebody else's process
MAX_SHAPE = 1.5
LEAST_SHARE = 0.2  # of the grid's cost that no speed goes below
REDRAW_EVERY = 48  # observations between which a curve keeps its shape
CONTEXT_STEP = 128  # curves are kept for multiples of this


class CostTable:
    """Milliseconds of a forward over ``rows`` rows that look back on ``context`` tokens each.

    A grid measured at start, times exp(shape[rows]), at the machine's present speed (`MachineSpeed`), which is followed
    within some ten steps. The shape learns slowly what the grid got wrong about a number of rows. Both move by clipped
    steps. Costs never fall with rows.

    rows, contexts: rising grid points. ms: float [contexts, rows]. measured: False for a guess, which the first
    observation replaces.

    Raises:
        ValueError: the grid does not rise, or a cost is not positive.
    """

    def __init__(
        self, rows: Sequence[int], contexts: Sequence[int], ms: Sequence[Sequence[float]], measured: bool = True
    ) -> None:
        self._rows = np.asarray(rows, float)
        self._grid_rows = self._rows.tolist()
        self._contexts = np.asarray(contexts, float)
        self._ms = np.asarray(ms, float)
        if self._ms.shape != (len(contexts), len(rows)) or not (self._ms > 0).all():
            raise ValueError("ms: must be positive, one row per context and one column per number of rows")
        if (np.diff(self._rows) <= 0).any() or (np.diff(self._contexts) <= 0).any():
            raise ValueError("rows, contexts: must rise")
        # Noise only ever adds: what more rows did in less time, fewer rows can do as well.
        self._ms = np.minimum.accumulate(self._ms[:, ::-1], axis=1)[:, ::-1]
        self._shape = [0.0] * len(rows)
        self._speed = MachineSpeed()
        # Each as a list too, in which one value is looked up more quickly.
        self._curves: dict[int, tuple[NDArray[np.float64], list[float]]] = {}
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

    def curve(self, context: float) -> NDArray[np.float64]:
        """Milliseconds by number of rows, float64 [largest rows + 1]; entry 0 is 0. Do not write to it."""
        curve, _ = self._curve(context)
        # `MachineSpeed.extra` is linear, so that of all rows comes from that of two.
        first = float(curve[1])
        present = curve * (1.0 + self._speed.extra(0.0, 1.0)) + first * self._speed.extra(1.0, -1.0)
        present = np.maximum(present, LEAST_SHARE * curve)
        present[0] = 0.0
        return present

    def ms(self, rows: int, context: float = 0) -> float:
        """Expected milliseconds; beyond the grid, in proportion."""
        _, curve = self._curve(context)
        base = _measured(curve, rows)
        return max(base + self._speed.extra(curve[1], base - curve[1]), LEAST_SHARE * base)

    @property
    def largest(self) -> int:
        """Most rows that `curve` reaches to."""
        return int(self._rows[-1])

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
            self._curves.clear()
            return
        step = max(-CLIP, min(CLIP, math.log(ms / expected)))
        _, curve = self._curve(context)
        self._speed.observe(curve[1], _measured(curve, rows) - curve[1], expected, step)
        right = bisect_left(self._grid_rows, rows)
        for at in {max(right - 1, 0), min(right, len(self._shape) - 1)}:
            near = 1.0 - min(1.0, abs(math.log(rows / self._grid_rows[at])) / math.log(2.0))
            moved = self._shape[at] + SHAPE * near * step
            self._shape[at] = max(-MAX_SHAPE, min(MAX_SHAPE, moved))
        if self._observed % REDRAW_EVERY == 0:
            self._curves.clear()

    def _curve(self, context: float) -> tuple[NDArray[np.float64], list[float]]:
        """As the grid has it, with what was learnt of its shape; the machine's speed is left out."""
        key = round(context / CONTEXT_STEP)
        found = self._curves.get(key)
        if found is None:
            grid = rising(self._grid(key * CONTEXT_STEP) * np.exp(self._shape))
            curve = np.interp(np.arange(int(self._rows[-1]) + 1), self._rows, grid)
            curve[0] = 0.0
            found = self._curves[key] = curve, curve.tolist()
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


def _measured(curve: Sequence[float], rows: int) -> float:
    last = len(curve) - 1
    return curve[rows] if rows <= last else curve[last] * rows / last


def rising(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The closest rising sequence in the least-squares sense (pool adjacent violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] > mean:
            other = counts.pop()
            mean = (means.pop() * other + mean * count) / (other + count)
            count += other
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
