"""Measures at start what the controller must know: a forward by rows and context, levels of model-based drafters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from draft.protocol import Drafter, ModelBasedDrafter
from specdec.config import SpeculationConfig
from specdec.control.costs import CostTable
from specdec.models.decoder import TargetDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch

VERIFY_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
LEVEL_ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 1024)
DRAFT_SHARE = 0.25  # of the time given
REPEATS = 7
LONG_ROWS = (128, 256, 512)  # extrapolated: prompts' chunks are not up for decision


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured tables as plain values (`CostTable.as_dict`): the target's forward, and a level of each drafter."""

    verify: dict[str, Any]
    drafting: dict[str, dict[str, Any]] = field(default_factory=dict)


def costs_at_start(
    speculation: SpeculationConfig, decoder: TargetDecoder, drafters: Sequence[Drafter]
) -> StepCosts | None:
    """What `profile_costs` finds; None where nothing is to be decided by it, or it was given no time."""
    if not (speculation.enabled and drafters and speculation.profile_s > 0):
        return None
    model_based = [cast(ModelBasedDrafter, drafter) for drafter in drafters if drafter.model_based]
    return profile_costs(decoder, model_based, speculation.profile_s)


def profile_costs(decoder: TargetDecoder, drafters: Iterable[ModelBasedDrafter], seconds: float) -> StepCosts:
    """Measure for about ``seconds``, at least twice each; nothing may run yet. The grid is walked in turns.

    Every forward reads whatever the pool holds and writes to it: only its time is of interest, and no sequence knows
    the pages yet.
    """
    drafters = list(drafters)
    share = seconds * DRAFT_SHARE / len(drafters) if drafters else 0.0
    verify = _verify_table(decoder, seconds - share * len(drafters))
    drafting = {drafter.name: _level_table(drafter, decoder, share) for drafter in drafters}
    return StepCosts(verify.as_dict(), {name: table.as_dict() for name, table in drafting.items()})


def _verify_table(decoder: TargetDecoder, seconds: float) -> CostTable:
    limit = min(decoder.pool.pages * PAGE_SIZE, decoder.max_positions)
    rows = [r for r in VERIFY_ROWS if r <= min(decoder.max_logit_rows, decoder.max_rows) and r < limit]
    contexts = [c for c in CONTEXTS if c + rows[-1] <= limit] or [0]

    def forward(n: int, context: int) -> None:
        pages = list(range(-(-(context + n) // PAGE_SIZE)))
        entry = BatchEntry([0] * n, list(range(-1, n - 1)), context, pages)
        decoder.forward(ForwardBatch.build([entry]), list(range(n)))

    points: dict[Any, Callable[[], None]] = {(n, c): partial(forward, n, c) for c in contexts for n in rows}
    _warm_up(points, decoder.settling)
    found = _best(points, seconds)
    grid = [[found[n, c] for n in rows] for c in contexts]
    return _extended(rows, contexts, grid, decoder.max_rows)


def _level_table(drafter: ModelBasedDrafter, target: TargetDecoder, seconds: float) -> CostTable:
    rows = [r for r in LEVEL_ROWS if r <= target.max_rows]
    points: dict[Any, Callable[[], None]] = {n: partial(drafter.warm_up, n) for n in rows}
    _warm_up(points, target.settling)  # what a drafter's forward runs on is what its target's does
    found = _best(points, seconds)
    return _extended(rows, [0], [[found[n] for n in rows]], target.max_rows)


def _warm_up(points: dict[Any, Callable[[], None]], times: int) -> None:
    for run in points.values():
        for _ in range(times):
            run()


def _best(points: dict[Any, Callable[[], None]], seconds: float) -> dict[Any, float]:
    """Milliseconds per point; rounds over all points until the time is used up. The best of the rounds counts, since
    other work on the machine only ever adds."""
    times: dict[Any, list[float]] = {point: [] for point in points}
    began = time.perf_counter()
    next(iter(points.values()))()  # the first forward pays for touching the memory
    for repeat in range(REPEATS):
        for point, run in points.items():
            start = time.perf_counter()
            run()
            times[point].append((time.perf_counter() - start) * 1e3)
        if repeat and time.perf_counter() - began >= seconds:
            break
    return {point: max(1e-6, min(found)) for point, found in times.items()}


def _extended(rows: list[int], contexts: list[int], grid: list[list[float]], max_rows: int) -> CostTable:
    """With points for long chunks, in proportion to the last slope."""
    more = [r for r in (*LONG_ROWS, max_rows) if rows[-1] < r <= max_rows]
    more = sorted(set(more))
    for line in grid:
        slope = max(line[-1] - line[-2], 0.0) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        line += [line[len(rows) - 1] + slope * (r - rows[-1]) for r in more]
    return CostTable([*rows, *more], contexts, grid)
