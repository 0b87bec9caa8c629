"""When a run has asked enough."""

from __future__ import annotations

import math

from server.experiment.analysis.analyse import analyse
from server.experiment.manifest import Manifest
from server.experiment.record_log import RecordLog

_DECIDED = ("better", "worse", "equivalent")
_GROWTH = 1.1  # looks get rarer as records become many: all of them together cost about ten of the last


class StopRule:
    """Looks at the records of ``log`` as they grow, where the plan's intervals hold whenever one looks."""

    def __init__(self, manifest: Manifest, log: RecordLog) -> None:
        self._manifest, self._log = manifest, log
        self._stopping = manifest.config.stopping
        self._next = self._stopping.min_units

    def why(self, units: int, mismatched: int, spent_s: float) -> str:
        """Why to stop after ``units`` pairs or blocks and ``spent_s`` seconds; empty: go on."""
        limit = self._stopping.max_duration
        if limit is not None and spent_s >= limit:
            return f"{limit:g} s have passed"
        if self._stopping.rule != "always_valid" or units < self._next:
            return ""
        self._next = max(units + 1, math.ceil(units * _GROWTH))
        if mismatched and self._manifest.config.assignment.expect_same_tokens:
            return f"{mismatched} pairs got different tokens, and whatever follows can not mend that"
        kind = analyse(self._manifest, self._log).verdict.kind
        return f"the verdict is certain: {kind}" if kind in _DECIDED else ""
