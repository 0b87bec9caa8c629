"""Makes experiments up from the records of one in which both arms were the same."""

from __future__ import annotations

import numpy as np

from server.experiment.stats.special import Floats
from server.experiment.stats.two_arm_sample import Indices, TwoArmSample


class Redraw:
    """Draws whole units with replacement. Arms are swapped at random (units with both) or dealt anew (units with one),
    so that nothing but chance lies between them; then B's values are multiplied."""

    def __init__(self, sample: TwoArmSample) -> None:
        self._arms = [_Rows(*arm, sample.n_units) for arm in zip(sample.values, sample.units, strict=True)]
        self._strata = sample.strata()
        self._pooled = _Rows(np.concatenate(sample.values), np.concatenate(sample.units), sample.n_units)

    def draw(self, n_units: int, factor: float, rng: np.random.Generator) -> TwoArmSample:
        """An experiment of so many units."""
        chosen = rng.choice(np.concatenate(self._strata), n_units)
        if len(self._strata) == 1:
            swapped = rng.random(n_units) < 0.5
            arms = [self._both(chosen, swapped), self._both(chosen, ~swapped)]
        else:
            dealt = rng.permutation(n_units)
            half = n_units // 2
            arms = [self._pooled.take(chosen[part], part) for part in (dealt[:half], dealt[half:])]
        (a, units_a), (b, units_b) = arms
        return TwoArmSample((a, b * factor), (units_a, units_b), n_units)

    def _both(self, chosen: Indices, second: np.ndarray) -> tuple[Floats, Indices]:
        """The values of one arm of each unit: the other arm's where ``second``."""
        places = np.arange(len(chosen))
        parts = [
            rows.take(chosen[mask], places[mask]) for rows, mask in zip(self._arms, (~second, second), strict=True)
        ]
        values, units = (np.concatenate(part) for part in zip(*parts, strict=True))
        return values, units


class _Rows:
    """Values by unit."""

    def __init__(self, values: Floats, units: Indices, n_units: int) -> None:
        order = np.argsort(units, kind="stable")
        self._values = values[order]
        self._sizes = np.bincount(units, minlength=n_units)
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)[:-1]))

    def take(self, chosen: Indices, labels: Indices) -> tuple[Floats, Indices]:
        """All values of the ``chosen`` units, and the label of each."""
        sizes = self._sizes[chosen]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        within = np.arange(total) - np.repeat(ends - sizes, sizes)
        return self._values[np.repeat(self._starts[chosen], sizes) + within], np.repeat(labels, sizes)
