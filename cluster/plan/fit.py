"""What a decision trace tells of a server: how fast forwards are there, what drafting brings, what else takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cluster.plan.arrivals import PlannedRequest
from cluster.plan.profile import DraftedStep, Overheads
from cluster.plan.simulate import FleetPlan, simulate
from specdec.control.estimates.costs import CostTable
from specdec.control.trace import read_trace
from specdec.core.types import StepTrace
from specdec.errors import ConfigError

LEAST_STEPS = 50
QUANTILES = 64  # of the noise
MOST_DRAFTED = 4096  # steps that are kept, evenly chosen
LEAST_NOISE = 0.05
FEW = 5.0  # mean steps that a column is held to what it was by
OUTLIER = 3.0  # times as long as expected: somebody else's work, of which a plan knows nothing
BACK_TO_BACK_MS = 5.0  # between two steps: more is an idle engine, or a step in which nothing was sampled


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """As the fields of `Profile` of the same names."""

    verify: dict[str, Any]
    noise: tuple[float, ...]
    drafted: tuple[DraftedStep, ...]
    overheads: Overheads


def fit_steps(path: Path, *others: Path) -> FittedSteps:
    """From the decision trace of a server under a load such as it is to be planned for (`specdec serve --trace-file`),
    and those of ``others`` like it.

    Raises:
        ConfigError: it is no trace, holds too few steps, or a step that can not be.
    """
    controller, found = read_trace(path)
    found = chain(found, *(read_trace(other)[1] for other in others))
    steps = [step for step in found if step.rows > 0 and step.realised_verify_ms > 0]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"decisions: {path} holds {len(steps)} steps; at least {LEAST_STEPS} are needed")
    try:
        table = CostTable.from_dict(controller["verify"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"decisions: {path} has no cost table ({error!r})") from None
    verify = _as_found(_at_speed_of(table, steps), steps)
    now = CostTable.from_dict(verify)
    ratios = np.array([step.realised_verify_ms / now.ms(step.rows, step.context) for step in steps])
    noise = np.quantile(ratios[ratios < OUTLIER], (np.arange(QUANTILES) + 0.5) / QUANTILES)
    noise = np.maximum(noise / noise.mean(), LEAST_NOISE)
    drafted = _drafted(steps)
    overheads = _overheads(steps, drafts=bool(drafted))
    return FittedSteps(verify, tuple(float(value) for value in noise.round(5)), drafted, overheads)


def _at_speed_of(table: CostTable, steps: Sequence[StepTrace]) -> dict[str, Any]:
    """``table`` at the speed that the machine had beside everything else that ran there: of reading the weights, and of
    what more rows add (`MachineSpeed`), by least squares of relative errors."""
    first = np.array([table.ms(1, step.context) for step in steps])
    whole = np.array([table.ms(step.rows, step.context) for step in steps])
    took = np.array([step.realised_verify_ms for step in steps])
    typical = took < OUTLIER * np.median(took / whole) * whole
    reading, rows = _two_shares(first[typical], (whole - first)[typical], took[typical])
    values = table.as_dict()
    values["ms"] = [[line[0] * reading + (ms - line[0]) * rows for ms in line] for line in values["ms"]]
    values["measured"] = True
    return values


def _as_found(values: dict[str, Any], steps: Sequence[StepTrace]) -> dict[str, Any]:
    """A table whose columns are brought to what forwards of about so many rows took, as far as there were any: beside a
    server they are not slower by one share alone."""
    table, grid = CostTable.from_dict(values), np.array(values["rows"])
    rows = np.array([step.rows for step in steps])
    nearest = np.abs(np.log(rows[:, None] / grid[None, :])).argmin(axis=1)
    expected = np.array([table.ms(step.rows, step.context) for step in steps])
    took = np.minimum([step.realised_verify_ms for step in steps], OUTLIER * expected)
    shares = [
        (took[nearest == at].sum() + FEW * expected.mean()) / (expected[nearest == at].sum() + FEW * expected.mean())
        for at in range(len(grid))
    ]
    return values | {"ms": [[ms * share for ms, share in zip(line, shares, strict=True)] for line in values["ms"]]}


def _two_shares(first: NDArray[Any], more: NDArray[Any], took: NDArray[Any]) -> tuple[float, float]:
    parts = np.stack([first / took, more / took], axis=1)
    shares, *_ = np.linalg.lstsq(parts, np.ones(len(took)), rcond=None)
    if shares.min() > 0.1:
        return float(shares[0]), float(shares[1])
    both = float(np.median(took / (first + more)))  # the steps are too much alike to tell the two apart
    return both, both


def _drafted(steps: Sequence[StepTrace]) -> tuple[DraftedStep, ...]:
    """Steps' trees and tokens; nothing where nothing was ever drafted."""
    if not any(step.budget for step in steps):
        return ()
    alone = [step for step in steps if not step.prefill_rows]  # beside prompts fewer are drafted, as rows allow
    steps = alone or steps
    chosen = [steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), MOST_DRAFTED)).astype(int)]
    return tuple(
        DraftedStep(sequences=_sequences(step), draft_ms=round(step.realised_draft_ms, 4))
        for step in chosen
        if step.sequences
    )


def _sequences(step: StepTrace) -> tuple[tuple[int, int], ...]:
    """Draft nodes and tokens of each sequence, which a trace file tells; else shared out evenly."""
    replay = cast(dict[str, Any], step.replay)
    if replay:
        pairs = zip(replay["kept"], replay["outcome"]["tokens"], strict=True)
        return tuple((len(kept), max(1, min(len(tokens), len(kept) + 1))) for kept, tokens in pairs)
    count = step.sequences
    nodes, tokens = (_dealt(total, count) for total in (step.budget, step.realised_tokens))
    return tuple((n, max(1, min(t, n + 1))) for n, t in zip(nodes, tokens, strict=True))


def _dealt(total: int, count: int) -> list[int]:
    return [total // count + (i < total % count) for i in range(count)]


def _overheads(steps: Sequence[StepTrace], *, drafts: bool) -> Overheads:
    """What steps took beside their forwards, by how many sequences were in them: planning, committing, and what passes
    until the next one begins. The propose stage too, where it only hands out empty trees."""
    inside = np.array([step.plan_ms + step.commit_ms + (0 if drafts else step.realised_draft_ms) for step in steps])
    whole = np.array([step.plan_ms + step.commit_ms + step.realised_ms for step in steps])
    began = np.array([step.at_s * 1e3 for step in steps])
    gaps = began[1:] - began[:-1] - whole[:-1]
    close = (gaps >= 0) & (gaps < BACK_TO_BACK_MS)
    between = float(np.median(gaps[close])) if close.any() else 0.0
    counts = np.array([step.sequences for step in steps], float)
    kept = inside <= np.quantile(inside, 0.99)
    slope = 0.0
    if np.ptp(counts[kept]) > 0:
        slope = max(0.0, float(np.polyfit(counts[kept], inside[kept], 1)[0]))
    base = max(0.0, float(np.mean(inside[kept]) - slope * np.mean(counts[kept])))
    return Overheads(step_ms=round(base + between, 4), step_ms_per_sequence=round(slope, 4))


def fit_request_ms(plan: FleetPlan, requests: Sequence[PlannedRequest], waited_ms: float) -> float:
    """Milliseconds of a request that are not the engine's: what ``requests`` waited for their first tokens at the
    median, less what the fleet of ``plan`` says that they wait in the engine."""
    overheads = plan.profile.overheads.model_copy(update={"request_ms": 0.0})
    bare = plan.profile.model_copy(update={"overheads": overheads})
    run = simulate(replace(plan, profile=bare), requests)
    expected_ms = float(np.median([record.ttft_ms for record in run.answered]))
    return round(max(0.0, float(waited_ms) - expected_ms), 3)


def captured_wait_ms(requests: Sequence[PlannedRequest]) -> float:
    """The median time to the first tokens of captured requests, in ms.

    Raises:
        ConfigError: the trace that they are of does not tell.
    """
    waited = [one.was_first_s for one in requests if one.was_first_s is not None]
    if not waited:
        raise ConfigError("captured: the trace does not tell when first tokens came (was_first_s); capture it again")
    return float(np.median(waited)) * 1e3
