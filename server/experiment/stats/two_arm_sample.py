"""Values of two arms, and which of them belong together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.experiment.stats.special import Floats

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TwoArmSample:
    """Values of arms A and B, and the unit (pair, time block, session) each one is from.

    ``values`` are two arrays [n_a] and [n_b], ``units`` two of the same lengths with numbers 0 .. n_units - 1 that
    follow time. Values of different units are taken as independent, up to `merged`.
    """

    values: tuple[Floats, Floats]
    units: tuple[Indices, Indices]
    n_units: int

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.values[0]), len(self.values[1])

    def present(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Per arm, which units [n_units] have values in it."""
        a, b = (np.bincount(units, minlength=self.n_units) > 0 for units in self.units)
        return a, b

    def strata(self) -> list[Indices]:
        """The units in groups to be resampled each on its own: by arm where no unit has both, else all together."""
        a, b = self.present()
        if np.any(a & b):
            return [np.flatnonzero(a | b)]
        return [np.flatnonzero(a), np.flatnonzero(b)]

    def merged(self, length: int) -> TwoArmSample:
        """The same with ``length`` consecutive units as one: non-overlapping blocks (Carlstein 1986)."""
        if length <= 1:
            return self
        a, b = (units // length for units in self.units)
        return TwoArmSample(self.values, (a, b), -(-self.n_units // length))
