"""Acceptance rates: the chance that a proposed node is accepted if its parent is, estimated while serving."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specdec.control.params import DEFAULT_PARAMS, ControlParams

# Bounds of the calibration's cells. Traces and profiles store cell numbers, so a change raises the versions of both
# files (`VERSION` of control/trace.py, `_VERSION` of engine/profile_cache.py).
PROB_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.985)  # a drafter's own probability
DEPTH_EDGES = (2, 3, 4, 6, 9)  # depths 1, 2, 3, 4-5, 6-8, 9 and more
TEMPERATURE_EDGES = (1e-9, 0.5, 1.0)  # greedy, up to 0.5, up to 1, above
RANKS = 4  # ranks 0, 1, 2, 3 and more
_PROBS, _DEPTHS, TEMPERATURES = len(PROB_EDGES) + 1, len(DEPTH_EDGES) + 1, len(TEMPERATURE_EDGES) + 1
_SHAPE = (TEMPERATURES, RANKS, _DEPTHS, _PROBS)
CELLS = math.prod(_SHAPE)
_MIDDLES = [math.sqrt(a * b) for a, b in pairwise((0.01, *PROB_EDGES, 1.0))]  # of a drafter's own probability


def temperature_bucket(temperature: float) -> int:
    """Index of a temperature: 0 greedy, 1 up to 0.5, 2 up to 1, 3 above."""
    return bisect_left(TEMPERATURE_EDGES, temperature) if temperature > 0 else 0


class Calibration:
    """Acceptance rates by drafter, temperature, rank among siblings, depth, and the drafter's own probability.

    Only nodes whose parent was reached are counted: nodes under a rejected parent are censored, not rejected. The rates
    of a temperature and rank start at the drafter's own probabilities, all log-odds shifted by one amount that fits
    their observations. Rates over all depths shrink towards these, those of a depth towards rates over all depths.
    Counts decay by halving.
    """

    def __init__(self, drafters: Sequence[str], params: ControlParams = DEFAULT_PARAMS) -> None:
        self._params = params
        self._index = {name: i for i, name in enumerate(drafters)}
        shape = (len(drafters), *_SHAPE)
        self._hits, self._trials = np.zeros(shape), np.zeros(shape)
        self._flat_hits, self._flat_trials = self._hits.reshape(-1), self._trials.reshape(-1)
        self._rates: list[float] = []
        self._observed: set[int] = set()  # drafters with observations since the last refresh
        for drafter in range(len(drafters)):
            self._rates += self._estimate(drafter)

    @property
    def size(self) -> int:
        """Number of cells."""
        return self._flat_trials.size

    def cell(self, drafter: str, bucket: int, rank: int, depth: int, prob: float) -> int:
        """Cell that counts a node of ``drafter``. bucket: of `temperature_bucket`; rank: from 0; depth: from 1."""
        at = (self._index[drafter] * TEMPERATURES + bucket) * RANKS + (rank if rank < RANKS else RANKS - 1)
        return (at * _DEPTHS + bisect_right(DEPTH_EDGES, depth)) * _PROBS + bisect_right(PROB_EDGES, prob)

    def rate(self, cell: int) -> float:
        """Estimated acceptance rate of the nodes of ``cell`` whose parent is accepted."""
        return self._rates[cell]

    def chance(self, cell: int, prob: float) -> float:
        """Estimated chance that a node of ``cell`` is accepted if its parent is.

        prob: the drafter's own probability, by which chances within a cell differ.
        """
        chance = self._rates[cell] * prob / _MIDDLES[cell % _PROBS]
        return min(max(chance, self._params.min_chance), self._params.max_chance)

    def observe(self, trials: Iterable[tuple[int, bool]]) -> None:
        """Count nodes whose parent was reached: (cell, whether the target chose it)."""
        hits, counts, observed = self._flat_hits, self._flat_trials, self._observed
        for cell, hit in trials:
            counts[cell] += 1.0
            observed.add(cell // CELLS)
            if hit:
                hits[cell] += 1.0

    def refresh(self) -> None:
        """Recompute `rate` of the drafters that were observed since the last call."""
        for drafter in sorted(self._observed):
            self._rates[drafter * CELLS : (drafter + 1) * CELLS] = self._estimate(drafter)
        self._observed.clear()

    def counts(self, drafter: str) -> list[tuple[int, float, float]]:
        """Observations of ``drafter``: (cell relative to its first one, hits, trials)."""
        first = self._index[drafter] * CELLS
        hits, trials = self._flat_hits[first : first + CELLS], self._flat_trials[first : first + CELLS]
        return [(int(cell), float(hits[cell]), float(trials[cell])) for cell in np.flatnonzero(trials)]

    def start(self, drafter: str, counts: Iterable[tuple[int, float, float]]) -> None:
        """Set a drafter's observations to those that `counts` returned, in this process or another."""
        at = self._index[drafter]
        for cell, hits, trials in counts:
            self._flat_hits[at * CELLS + cell], self._flat_trials[at * CELLS + cell] = hits, trials
        self._rates[at * CELLS : (at + 1) * CELLS] = self._estimate(at)

    def _estimate(self, drafter: int) -> list[float]:
        """Rates of a drafter's cells, from the coarsest estimate to the finest."""
        hits, trials = self._hits[drafter], self._trials[drafter]
        old = trials > self._params.cell_memory
        if old.any():
            hits[old] *= 0.5
            trials[old] *= 0.5
        params = self._params
        rate = np.asarray(_MIDDLES)
        for axes in ((0, 2), 2):  # of all temperatures, then of each
            rate = _shifted(rate, hits.sum(axes, keepdims=True), trials.sum(axes, keepdims=True), params)
        rate = _shrunk(hits.sum(2, keepdims=True), trials.sum(2, keepdims=True), rate, params.shrinkage)
        rate = _shrunk(hits, trials, rate, params.shrinkage)
        rates: list[float] = np.clip(rate, params.min_chance, params.max_chance).reshape(-1).tolist()
        return rates


def _shifted(
    rates: NDArray[np.float64], hits: NDArray[np.float64], trials: NDArray[np.float64], params: ControlParams
) -> NDArray[np.float64]:
    """``rates`` [probs] with their log-odds shifted, per temperature and rank, towards ``hits`` of ``trials``.

    The shift is one Newton step, from 0, of logistic regression on the intercept, whose prior is normal with mean 0
    and ``params.shift_precision``.
    """
    expected = (trials * rates).sum(-1, keepdims=True)
    spread = (trials * rates * (1.0 - rates)).sum(-1, keepdims=True)
    shift = (hits.sum(-1, keepdims=True) - expected) / (spread + params.shift_precision)
    shift = np.clip(shift, -params.max_shift, params.max_shift)
    return 1.0 / (1.0 + (1.0 / rates - 1.0) * np.exp(-shift))


def _shrunk(
    hits: NDArray[np.float64], trials: NDArray[np.float64], towards: NDArray[np.float64], weight: float
) -> NDArray[np.float64]:
    return (hits + weight * towards) / (trials + weight)
