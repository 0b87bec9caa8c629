"""Auto against the fixed settings of speculation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from bench.engine_arm import AUTO, OFF
from bench.engine_workload_runs import WorkloadRuns


def fixed_figures(runs: WorkloadRuns, fixed: Seq[str]) -> dict[str, float | None]:
    """Milliseconds per output token in off, auto and every arm named in ``fixed``."""
    times = {arm: runs.ms_per_token(arm) for arm in (OFF.name, AUTO.name, *fixed)}
    return {arm: None if ms is None else round(ms, 4) for arm, ms in times.items()}


def best_fixed(runs: WorkloadRuns, fixed: Seq[str]) -> dict[str, Any] | None:
    """The fastest of the arms named in ``fixed`` for this workload, chosen with hindsight, and its time over auto's
    (above 1: auto is faster). None when nothing was long enough to time."""
    figures = fixed_figures(runs, fixed)
    timed = [(ms, arm) for arm in fixed if (ms := figures[arm]) is not None]
    auto = figures[AUTO.name]
    if not timed or auto is None:
        return None
    ms, arm = min(timed)
    return {"setting": arm, "ms_per_token": ms, "over_auto": round(ms / auto, 4)}
