"""What was learned of a drafter and outlasts its controller: plain values, and how much they count for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.control.calibration import CELLS, TEMPERATURES
from specdec.control.inputs import DraftRecord
from specdec.core.tree import MAX_NODES

CELL_MOST = 16.0  # observations that a cell of the calibration is thought to rest on, however many there were
POOL_MOST = 10.0  # steps that what a drafter brings is thought to rest on


@dataclass(frozen=True, slots=True)
class Learned:
    """cells: (cell, hits, trials), where the calibration counts a drafter's nodes. pools: (temperature bucket, steps,
    tokens, levels, rows), what its trees brought (`DraftRecord`). follow: share of reached nodes below which it holds
    the target's choice; None: not known."""

    cells: Sequence[tuple[int, float, float]] = ()
    pools: Sequence[tuple[int, float, float, float, float]] = ()
    follow: float | None = None

    def bounded(self) -> Learned:
        """The same at the weight of a few observations, so that new ones soon count for more."""
        cells = []
        for cell, hits, trials in self.cells:
            share = min(1.0, CELL_MOST / trials)
            cells.append((cell, round(share * hits, 2), round(share * trials, 2)))
        pools = []
        for bucket, steps, tokens, levels, rows in self.pools:
            share = min(1.0, POOL_MOST / steps)
            tokens, levels, rows = (round(share * value, 2) for value in (tokens, levels, rows))
            pools.append((bucket, round(share * steps, 2), tokens, levels, rows))
        return Learned(cells, pools, None if self.follow is None else round(self.follow, 3))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, exactly."""
        return {"cells": list(self.cells), "pools": list(self.pools), "follow": self.follow}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Learned:
        """What `as_dict` gave.

        Raises:
            ValueError, TypeError, KeyError, OverflowError: it is nothing that a controller learns.
        """
        cells, pools, follow = [], [], values["follow"]
        for cell, hits, trials in values["cells"]:
            if not (0 <= int(cell) < CELLS and 0 <= hits <= trials and 0 < trials < math.inf):
                raise ValueError(f"cells: {cell} with {hits} of {trials}")
            cells.append((int(cell), float(hits), float(trials)))
        for bucket, steps, tokens, levels, rows in values["pools"]:
            sound = all(0 <= value < math.inf for value in (steps, tokens, levels, rows))
            sound = sound and max(tokens, levels, rows) <= MAX_NODES * steps  # none exceeds a tree
            if not (0 <= int(bucket) < TEMPERATURES and sound and steps > 0 and levels > 0):
                raise ValueError(f"pools: {bucket} with {steps}, {tokens}, {levels}, {rows}")
            pools.append((int(bucket), float(steps), float(tokens), float(levels), float(rows)))
        if follow is not None and not 0.0 <= float(follow) <= 1.0:
            raise ValueError(f"follow: {follow}")
        return Learned(cells, pools, follow)

    def records(self) -> dict[int, DraftRecord]:
        """``pools`` by temperature bucket."""
        return {bucket: DraftRecord(steps, tokens, levels, rows) for bucket, steps, tokens, levels, rows in self.pools}
