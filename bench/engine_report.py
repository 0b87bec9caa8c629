"""Everything one run of `specdec bench engine` found."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from bench.engine_control_times import ControlTimes
from bench.engine_fixed import best_fixed, fixed_figures
from bench.engine_off_cost import OffCost
from bench.engine_workload_runs import WorkloadRuns
from bench.reliability import Bin, reliability_figures


@dataclass(slots=True)
class EngineReport:
    """``fixed``: names of the fixed settings that ran too; ``skipped``: what could not be run, and why. ``off_cost``
    and ``control_times`` are None unless asked for."""

    machine: dict[str, Any]
    runs: list[WorkloadRuns] = field(default_factory=list)
    fixed: tuple[str, ...] = ()
    skipped: list[str] = field(default_factory=list)
    reliability: Mapping[str, Seq[Bin]] = field(default_factory=dict)
    off_cost: OffCost | None = None
    control_times: ControlTimes | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: all figures, those of every prompt too."""
        figures: dict[str, Any] = {
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
            "workloads": {runs.workload: runs.summary().as_dict() for runs in self.runs},
        }
        if self.fixed:
            figures["fixed_ms_per_token"] = {runs.workload: fixed_figures(runs, self.fixed) for runs in self.runs}
            figures["auto_against_best_fixed"] = {runs.workload: best_fixed(runs, self.fixed) for runs in self.runs}
        if self.off_cost is not None:
            figures["off_cost"] = self.off_cost.as_dict()
        if self.control_times is not None:
            figures["control_times"] = self.control_times.as_dict()
        figures["reliability"] = reliability_figures(self.reliability)
        figures["prompts"] = {runs.workload: runs.as_dict() for runs in self.runs}
        return figures
