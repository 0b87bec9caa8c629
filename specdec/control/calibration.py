"""The chance that a proposed node is accepted once its parent is, learnt while serving."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PROB_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.985)
DEPTH_EDGES = (2, 3, 4, 6, 9)  # depths 1, 2, 3, 4-5, 6-8, 9 and more
TEMPERATURE_EDGES = (1e-9, 0.5, 1.0)  # greedy, up to 0.5, up to 1, above
RANKS = 4
_PROBS, _DEPTHS, TEMPERATURES = len(PROB_EDGES) + 1, len(DEPTH_EDGES) + 1, len(TEMPERATURE_EDGES) + 1
_SHAPE = (TEMPERATURES, RANKS, _DEPTHS, _PROBS)
CELLS = math.prod(_SHAPE)
SHRINKAGE = 8.0  # observations that weigh as much as the coarser estimate above
MEMORY = 300.0  # observations a cell remembers: when it has more, all are halved
LEAST, MOST = 1e-3, 0.995
LOOKUP_DOUBT = 1.7  # texts that were read tell less of what is written next than of how often they repeat themselves


def temperature_bucket(temperature: float) -> int:
    """0 greedy, 1 up to 0.5, 2 up to 1, 3 above."""
    return bisect_left(TEMPERATURE_EDGES, temperature) if temperature > 0 else 0


class Calibration:
    """Hit rates of nodes by drafter, temperature, rank among siblings, depth, and the drafter's own probability.

    Only nodes whose parent was reached are counted: what lies under a rejected parent was not observed (censored),
    which is not the same as rejected. Rates shrink towards coarser ones (over depths, then over temperatures too) and
    in the end towards the drafter's own word; they are never certain. Counts decay by halving. lookups: those of the
    drafters that run no model.
    """

    def __init__(self, drafters: Sequence[str], lookups: Collection[str] = ()) -> None:
        self._index = {name: i for i, name in enumerate(drafters)}
        shape = (len(drafters), *_SHAPE)
        self._hits, self._trials = np.zeros(shape), np.zeros(shape)
        self._flat_hits, self._flat_trials = self._hits.reshape(-1), self._trials.reshape(-1)
        self._priors = [_prior(LOOKUP_DOUBT if name in lookups else 1.0) for name in drafters]
        self._rates: list[float] = []
        self._fresh: set[int] = set()  # drafters observed since the last refresh
        for drafter in range(len(drafters)):
            self._rates += self._estimate(drafter)

    @property
    def size(self) -> int:
        """Number of cells."""
        return self._flat_trials.size

    def cell(self, drafter: str, bucket: int, rank: int, depth: int, prob: float) -> int:
        """Where a node of ``drafter`` is counted; ``bucket`` of `temperature_bucket`, depth from 1."""
        at = (self._index[drafter] * TEMPERATURES + bucket) * RANKS + (rank if rank < RANKS else RANKS - 1)
        return (at * _DEPTHS + bisect_right(DEPTH_EDGES, depth)) * _PROBS + bisect_right(PROB_EDGES, prob)

    def chance(self, cell: int) -> float:
        """Estimated chance that a node of ``cell`` is accepted, its parent being so."""
        return self._rates[cell]

    def observe(self, trials: Iterable[tuple[int, bool]]) -> None:
        """Count nodes whose parent was reached: (cell, whether the target chose it)."""
        hits, counts, fresh = self._flat_hits, self._flat_trials, self._fresh
        for cell, hit in trials:
            counts[cell] += 1.0
            fresh.add(cell // CELLS)
            if hit:
                hits[cell] += 1.0

    def refresh(self) -> None:
        """Let what was observed since the last call show in `chance`."""
        for drafter in sorted(self._fresh):
            self._rates[drafter * CELLS : (drafter + 1) * CELLS] = self._estimate(drafter)
        self._fresh.clear()

    def counts(self, drafter: str) -> list[tuple[int, float, float]]:
        """What ``drafter`` was observed to do: (cell, counted from its first, hits, trials)."""
        first = self._index[drafter] * CELLS
        hits, trials = self._flat_hits[first : first + CELLS], self._flat_trials[first : first + CELLS]
        return [(int(cell), float(hits[cell]), float(trials[cell])) for cell in np.flatnonzero(trials)]

    def start(self, drafter: str, counts: Iterable[tuple[int, float, float]]) -> None:
        """Begin with what `counts` gave, here or in another process."""
        at = self._index[drafter]
        for cell, hits, trials in counts:
            self._flat_hits[at * CELLS + cell], self._flat_trials[at * CELLS + cell] = hits, trials
        self._rates[at * CELLS : (at + 1) * CELLS] = self._estimate(at)

    def _estimate(self, drafter: int) -> list[float]:
        """Rates of a drafter's cells, from the coarsest estimate down."""
        hits, trials = self._hits[drafter], self._trials[drafter]
        old = trials > MEMORY
        if old.any():
            hits[old] *= 0.5
            trials[old] *= 0.5
        rate = _shrunk(hits.sum((0, 2), keepdims=True), trials.sum((0, 2), keepdims=True), self._priors[drafter])
        rate = _shrunk(hits.sum(2, keepdims=True), trials.sum(2, keepdims=True), rate)
        rate = _shrunk(hits, trials, rate)
        rates: list[float] = np.clip(rate, LEAST, MOST).reshape(-1).tolist()
        return rates


def _shrunk(
    hits: NDArray[np.float64], trials: NDArray[np.float64], towards: NDArray[np.float64]
) -> NDArray[np.float64]:
    return (hits + SHRINKAGE * towards) / (trials + SHRINKAGE)


def _middles() -> list[float]:
    edges = (0.01, *PROB_EDGES, 1.0)
    return [math.sqrt(a * b) for a, b in pairwise(edges)]


def _prior(doubt: float) -> NDArray[np.float64]:
    """A drafter's first choice is believed somewhat less than it believes itself, later ones as much. doubt: power of
    its own estimates that is believed."""
    own = np.asarray(_middles()) ** doubt
    return np.broadcast_to(np.stack([0.9 * own, *[own] * (RANKS - 1)])[None, :, None, :], _SHAPE)


BINS = 10


class Reliability:
    """Per drafter, in ten bins of predicted chance: what was predicted, what happened, how often."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._bins = {name: [[0.0, 0.0, 0.0] for _ in range(BINS)] for name in drafters}

    def add(self, drafter: str, predicted: float, hit: bool) -> None:
        """A node whose parent was reached."""
        found = self._bins[drafter][min(BINS - 1, int(predicted * BINS))]
        found[0] += predicted
        found[1] += hit
        found[2] += 1.0

    def table(self) -> dict[str, list[tuple[float, float, float]]]:
        """Per drafter the bins that hold anything: (mean predicted, observed rate, nodes)."""
        return {name: [(p / n, h / n, n) for p, h, n in bins if n] for name, bins in self._bins.items()}
