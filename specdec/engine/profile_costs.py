"""Measures at start the costs that the controller needs: forwards by rows and context, drafters' levels."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from draft.protocol import Drafter, ModelBasedDrafter
from specdec.config import SpeculationConfig
from specdec.control.estimates.costs import CostTable
from specdec.engine.profile_cache import ProfileCache
from specdec.models.decoder import TargetDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch

logger = logging.getLogger(__name__)

VERIFY_ROWS = (1, 2, 4, 8, 12, 13, 16, 32, 64)  # beyond 12, weights in blocks are unpacked first
LEVEL_ROWS = (1, 2, 4, 8, 16, 32, 128)  # the last for a drafter's prefill
COMMON_ROWS = 16  # most steps have at most these rows; they are measured at least twice
CONTEXTS = (64, 1024)  # tokens that rows attend to
DRAFT_SHARE = 0.25  # of the time, for the drafters
WARM_UP_SHARE = 0.8  # of the same time again, for the drafters' acceptance on `build.WARM_UP_TEXTS`
CHECK_ROWS = (1, 8, 32)  # measured to check cached costs
FLAT_SHARE = 0.05  # rows that add less than this share of the first row's time are not rescaled
TOLERANCE = 0.2  # log-ratio of measured and rescaled costs up to which cached costs are valid
LEAST_RATIO, MOST_RATIO = 0.5, 2.5  # accepted present times over cached times
REPEATS = 7  # measurements of a point at most; the best counts
LONG_ROWS = (128, 256, 512)  # extrapolated on a CPU: the controller does not decide about prompt chunks


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured tables as plain values (`CostTable.as_dict`)."""

    verify: dict[str, Any]
    """The target's forward."""
    drafting: dict[str, dict[str, Any]] = field(default_factory=dict)
    """A level of each model-based drafter."""


def costs_at_start(
    speculation: SpeculationConfig, decoder: TargetDecoder, drafters: Sequence[Drafter], kept: ProfileCache
) -> StepCosts | None:
    """Cached costs if they are still valid, else measured ones; None: no costs are needed, or no time is configured."""
    if not (speculation.enabled and drafters and speculation.profile_s > 0):
        return None
    model_based = [cast(ModelBasedDrafter, drafter) for drafter in drafters if drafter.model_based]
    costs = check_costs(decoder, model_based, kept)
    if costs is None:
        costs = profile_costs(decoder, model_based, speculation.profile_s)
        kept.write(dataclasses.asdict(costs))
    step_ms = CostTable.from_dict(costs.verify).ms(1)
    for drafter in model_based:
        level_ms = CostTable.from_dict(costs.drafting[drafter.name]).ms(1)
        if level_ms >= step_ms and not drafter.tree_rows:
            logger.warning(
                "drafter %s: a draft token takes %.1f ms, a step without drafts %.1f ms: it will hardly ever draft in "
                "mode auto; name a smaller one, or none", drafter.name, level_ms, step_ms,
            )  # fmt: skip
    return costs


def profile_costs(decoder: TargetDecoder, drafters: Iterable[ModelBasedDrafter], seconds: float) -> StepCosts:
    """Measure all points for about ``seconds``, at least once each. Forwards write to the pool, so no sequence may
    exist yet."""
    drafters = list(drafters)
    share = seconds * DRAFT_SHARE / len(drafters) if drafters else 0.0
    found = _best(_target_forwards(decoder), seconds - share * len(drafters), decoder.settling)
    verify = _table(found, decoder.max_rows, decoder.row_sizes)
    drafting = {}
    for drafter in drafters:
        found = _best(_level_forwards(drafter, decoder), share, decoder.settling)
        drafting[drafter.name] = _table(found, decoder.max_rows).as_dict()
    return StepCosts(verify.as_dict(), drafting)


def check_costs(decoder: TargetDecoder, drafters: Iterable[ModelBasedDrafter], kept: ProfileCache) -> StepCosts | None:
    """The cached costs at the machine's present speed; None: there are none, or a few forwards contradict them."""
    values = kept.read()
    if not values:
        return None
    checked = _again(CostTable.from_dict(values["verify"]), _target_forwards(decoder), decoder.settling)
    drafting = {}
    for drafter in drafters:
        level = CostTable.from_dict(values["drafting"][drafter.name])
        drafting[drafter.name] = _again(level, _level_forwards(drafter, decoder), decoder.settling)
    if checked is None or None in drafting.values():
        return None
    return StepCosts(checked, cast(dict[str, dict[str, Any]], drafting))


def contexts_measured(limit: int, rows: int = VERIFY_ROWS[-1]) -> list[int]:
    """Contexts at which forwards of ``rows`` are measured if a sequence has at most ``limit`` tokens."""
    return [context for context in CONTEXTS if context + rows <= limit] or [0]


Point = tuple[int, int]
"""Rows, and tokens that they attend to."""


def _target_forwards(decoder: TargetDecoder) -> dict[Point, Callable[[], None]]:
    """Forwards of the target to measure."""
    rows = _fitting(VERIFY_ROWS, decoder)
    most_sampled = rows[-1]
    limit = min(decoder.pool.pages * PAGE_SIZE, decoder.max_positions)
    contexts = contexts_measured(limit, most_sampled)
    if decoder.row_sizes:  # prompts' sizes too: drafts at a prompt's end may need a larger one
        rows = [n for n in decoder.row_sizes if n <= max(most_sampled, limit - contexts[-1])]

    def forward(n: int, context: int) -> None:
        pages = list(range(-(-(context + n) // PAGE_SIZE)))
        # Tokens that differ: equal ones would choose the same experts, which are then read once for all rows.
        tokens = [i * decoder.config.vocab_size // n for i in range(n)]
        entry = BatchEntry(tokens, list(range(-1, n - 1)), context, pages)
        decoder.forward(ForwardBatch.build([entry]), list(range(n)) if n <= most_sampled else [n - 1])

    return {(n, context): partial(forward, n, context) for n in rows for context in contexts}


def _level_forwards(drafter: ModelBasedDrafter, target: TargetDecoder) -> dict[Point, Callable[[], None]]:
    return {(n, 0): partial(drafter.warm_up, n) for n in _fitting(LEVEL_ROWS, target)}


def _fitting(rows: Sequence[int], decoder: TargetDecoder) -> list[int]:
    """Those of ``rows`` that one sequence can have in a forward, each with logits."""
    positions = min(decoder.pool.pages * PAGE_SIZE, decoder.max_positions)
    return [n for n in rows if n <= min(decoder.max_rows, decoder.max_logit_rows) and n < positions]


def _best(points: dict[Point, Callable[[], None]], seconds: float, settling: int) -> dict[Point, float]:
    """Milliseconds per point: the best of several rounds, since other work on the machine only adds time."""
    for run in points.values():
        for _ in range(settling):
            run()
    times: dict[Point, list[float]] = {point: [] for point in points}
    began = time.perf_counter()
    next(iter(points.values()))()  # the first forward also faults the memory in
    for repeat in range(REPEATS):
        for point, run in points.items():
            start = time.perf_counter()
            due = repeat == 0 or (repeat == 1 and point[0] <= COMMON_ROWS)
            if due or start - began < seconds:
                run()
                times[point].append(max(1e-6, (time.perf_counter() - start) * 1e3))
    return {point: min(found) for point, found in times.items()}


def _again(table: CostTable, points: dict[Point, Callable[[], None]], settling: int) -> dict[str, Any] | None:
    """``table`` rescaled to the machine's present speed of reading weights and of computing rows.

    None: the speed is far from the cached one, or does not explain the measured times.
    """
    contexts = sorted({context for _, context in points})
    wanted = [*((n, contexts[0]) for n in CHECK_ROWS), (1, contexts[-1])]
    found = _best({point: points[point] for point in wanted if point in points}, 0.0, settling)
    first, last = (1, contexts[0]), max(found)
    reading = more = found[first] / table.ms(*first)
    if table.ms(*last) - table.ms(*first) > FLAT_SHARE * table.ms(*first):
        more = max(found[last] - found[first], 0.0) / (table.ms(*last) - table.ms(*first))
    if not (LEAST_RATIO < reading < MOST_RATIO and LEAST_RATIO < more < MOST_RATIO):
        return None
    values = table.as_dict()
    values["ms"] = [[line[0] * reading + (ms - line[0]) * more for ms in line] for line in values["ms"]]
    now = CostTable.from_dict(values)
    alike = all(abs(math.log(ms / now.ms(*point))) < TOLERANCE for point, ms in found.items())
    return values if alike else None


def _table(found: dict[Point, float], max_rows: int, sizes: Sequence[int] = ()) -> CostTable:
    """The table of measured points, extrapolated to long chunks by the last slope. sizes: see `CostTable`."""
    rows, contexts = sorted({n for n, _ in found}), sorted({context for _, context in found})
    more = sorted({r for r in (*LONG_ROWS, max_rows) if rows[-1] < r <= max_rows})
    grid = []
    for context in contexts:
        line = [found[n, context] for n in rows]
        slope = max(line[-1] - line[-2], 0.0) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        grid.append(line + [line[-1] + slope * (r - rows[-1]) for r in more])
    return CostTable([*rows, *more], contexts, grid, sizes=sizes)
