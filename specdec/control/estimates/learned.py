"""Estimates of a drafter that outlive a controller, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.control.inputs import DraftRecord
from specdec.control.params import DEFAULT_PARAMS


@dataclass(frozen=True, slots=True)
class Learned:
    """The estimates of one drafter."""

    cells: Sequence[tuple[int, float, float]] = ()
    """(cell, hits, trials) of the calibration."""
    pools: Sequence[tuple[int, float, float, float, float]] = ()
    """(temperature bucket, steps, tokens, levels, rows): its `DraftRecord` of all sequences."""
    agreement: float | None = None
    """Share of tree levels in which it holds the target's choice; None: not observed."""

    def bounded(self) -> Learned:
        """The same with the weight of a few observations, so that new ones soon dominate."""
        cells = []
        for cell, hits, trials in self.cells:
            share = min(1.0, DEFAULT_PARAMS.learned_cell_trials / trials)
            cells.append((cell, round(share * hits, 2), round(share * trials, 2)))
        pools = []
        for bucket, steps, tokens, levels, rows in self.pools:
            share = min(1.0, DEFAULT_PARAMS.learned_pool_steps / steps)
            tokens, levels, rows = (round(share * value, 2) for value in (tokens, levels, rows))
            pools.append((bucket, round(share * steps, 2), tokens, levels, rows))
        return Learned(cells, pools, None if self.agreement is None else round(self.agreement, 3))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without loss."""
        return {"cells": list(self.cells), "pools": list(self.pools), "follow": self.agreement}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Learned:
        """The inverse of `as_dict`."""
        cells, pools = (list(map(tuple, values[name])) for name in ("cells", "pools"))
        return Learned(cells, pools, values["follow"])

    def records(self) -> dict[int, DraftRecord]:
        """``pools`` by temperature bucket."""
        return {bucket: DraftRecord(steps, tokens, levels, rows) for bucket, steps, tokens, levels, rows in self.pools}
