"""Measures a replica's profile: an engine's limits and forward costs, and what the traces of its server show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cluster.plan.arrivals import PlannedRequest, read_requests
from cluster.plan.profile import DraftedStep, Overheads, Profile, ReplicaLimits
from cluster.plan.simulate import FleetPlan, simulate
from draft.protocol import ModelBasedDrafter
from specdec.config import EngineConfig, ServerConfig
from specdec.control.estimates.costs import CostTable
from specdec.control.trace import read_trace
from specdec.core.types import MAX_QUEUED_REQUESTS, EngineInfo, StepTrace
from specdec.engine.engine import EngineParts
from specdec.engine.profile_costs import profile_costs
from specdec.errors import ConfigError

PROFILE_S = 3.0  # for measuring forwards, if the engine does not do it itself
MIN_STEPS = 50  # of a decision trace
NOISE_QUANTILES = 64
MAX_DRAFTED = 4096  # drafted steps in a profile, chosen at even distances
MIN_NOISE = 0.05  # factor
PRIOR_STEPS = 5.0  # mean steps that keep a column of the cost table at its former value
OUTLIER = 3.0  # factor over the expected time: caused by other processes, which a plan does not model
BACK_TO_BACK_MS = 5.0  # between two steps; a longer gap is an idle engine, or a step without samples


def export_profile(
    parts: EngineParts, server: ServerConfig, machine: str, decisions: Path | None = None, captured: Path | None = None
) -> Profile:
    """The profile of one replica: an engine of ``parts`` behind a server with configuration ``server``.

    machine: the processor's name. decisions: decision trace of such a server under load; without it the profile has no
    drafts, and steps take only their forwards on an idle machine. captured: trace of the requests of the same time, for
    their time outside the engine.

    Raises:
        ConfigError: a trace cannot be used.
    """
    limits = limits_of(parts.config, parts.info, server)
    about = {"target": parts.info.target, "machine": machine, "limits": limits}
    if decisions is None:
        return Profile.model_validate(about | {"verify": _measured(parts)})
    profile = Profile.model_validate(about | fit_steps(decisions))
    if captured is None:
        return profile
    try:
        requests = read_requests(captured)
    except ConfigError as error:
        raise ConfigError(f"--captured: {str(error).removeprefix('trace: ')}") from None
    return with_request_ms(profile, fit_request_ms(FleetPlan(profile, 1), requests, captured_wait_ms(requests)))


def with_request_ms(profile: Profile, request_ms: float) -> Profile:
    """``profile`` with ``request_ms`` milliseconds per request outside the engine."""
    return profile.model_copy(update={"overheads": profile.overheads.model_copy(update={"request_ms": request_ms})})


def limits_of(config: EngineConfig, info: EngineInfo, server: ServerConfig) -> ReplicaLimits:
    """The limits in force."""
    others = {
        "max_context": info.max_context, "kv_tokens": info.kv_tokens, "max_queued_requests": MAX_QUEUED_REQUESTS,
        "max_queued_tokens": server.max_queued_tokens,
    }  # fmt: skip
    of_engine = config.model_dump(include=ReplicaLimits.model_fields.keys() - others)
    return ReplicaLimits(**of_engine, **others)


def _measured(parts: EngineParts) -> dict[str, Any]:
    """The engine's initial costs; measured if it has none."""
    if parts.costs is not None:
        return parts.costs.verify
    drafters = [cast(ModelBasedDrafter, drafter) for drafter in parts.drafters if drafter.model_based]
    return profile_costs(parts.decoder, drafters, PROFILE_S).verify


def fit_steps(path: Path, *others: Path) -> dict[str, Any]:
    """The fields of `Profile` that decision traces of servers (`specdec serve --trace-file`) yield; their load should
    be like the planned one.

    Raises:
        ConfigError: a file is not a trace, holds too few steps, or an impossible step.
    """
    controller, found = read_trace(path)
    found = chain(found, *(read_trace(other)[1] for other in others))
    steps = [step for step in found if step.rows > 0 and step.realised_verify_ms > 0]
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"--decisions: {path} holds {len(steps)} steps; at least {MIN_STEPS} are needed")
    try:
        table = CostTable.from_dict(controller["verify"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--decisions: {path} has no cost table ({error!r})") from None
    verify = _as_found(_at_speed_of(table, steps), steps)
    now = CostTable.from_dict(verify)
    ratios = np.array([step.realised_verify_ms / now.ms(step.rows, step.context) for step in steps])
    noise = np.quantile(ratios[ratios < OUTLIER], (np.arange(NOISE_QUANTILES) + 0.5) / NOISE_QUANTILES)
    noise = np.maximum(noise / noise.mean(), MIN_NOISE)
    drafted = _drafted(steps)
    overheads = _overheads(steps, drafts=bool(drafted))
    return {"verify": verify, "noise": noise.round(5).tolist(), "drafted": drafted, "overheads": overheads}


def _at_speed_of(table: CostTable, steps: Sequence[StepTrace]) -> dict[str, Any]:
    """Scales ``table`` to the machine's speed under load: one factor for reading the weights and one for further
    rows (`MachineSpeed`), by least squares of relative errors."""
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
    """Scales each column of the table to the measured forwards with about as many rows: the slowdown depends on the
    number of rows."""
    table, grid = CostTable.from_dict(values), np.array(values["rows"])
    rows = np.array([step.rows for step in steps])
    nearest = np.abs(np.log(rows[:, None] / grid[None, :])).argmin(axis=1)
    expected = np.array([table.ms(step.rows, step.context) for step in steps])
    took = np.minimum([step.realised_verify_ms for step in steps], OUTLIER * expected)
    shares = [
        (took[nearest == at].sum() + PRIOR_STEPS * expected.mean())
        / (expected[nearest == at].sum() + PRIOR_STEPS * expected.mean())
        for at in range(len(grid))
    ]
    return values | {"ms": [[ms * share for ms, share in zip(line, shares, strict=True)] for line in values["ms"]]}


def _two_shares(first: NDArray[Any], more: NDArray[Any], took: NDArray[Any]) -> tuple[float, float]:
    parts = np.stack([first / took, more / took], axis=1)
    shares, *_ = np.linalg.lstsq(parts, np.ones(len(took)), rcond=None)
    if shares.min() > 0.1:
        return float(shares[0]), float(shares[1])
    both = float(np.median(took / (first + more)))  # the steps are too similar to separate the two
    return both, both


def _drafted(steps: Sequence[StepTrace]) -> tuple[DraftedStep, ...]:
    """The trees and tokens of steps; empty if nothing was drafted."""
    if not any(step.budget for step in steps):
        return ()
    alone = [step for step in steps if not step.prefill_rows]  # prompts take rows from drafts
    steps = alone or steps
    chosen = [steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), MAX_DRAFTED)).astype(int)]
    return tuple(
        DraftedStep(sequences=_sequences(step), draft_ms=round(step.realised_draft_ms, 4))
        for step in chosen
        if step.sequences
    )


def _sequences(step: StepTrace) -> tuple[tuple[int, int], ...]:
    """Draft nodes and tokens of each sequence."""
    if not step.replay:  # nothing was decided, so nothing was drafted
        return ((0, 1),) * step.sequences
    pairs = zip(step.replay["kept"], step.replay["outcome"]["tokens"], strict=True)
    return tuple((len(kept), max(1, min(len(tokens), len(kept) + 1))) for kept, tokens in pairs)


def _overheads(steps: Sequence[StepTrace], *, drafts: bool) -> Overheads:
    """Time of steps outside their forwards, by number of sequences: planning, committing and the gap to the next
    step; without drafts also the propose stage."""
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
    """Milliseconds of a request outside the engine: ``waited_ms``, the median time to first token, minus
    the time that the fleet of ``plan`` simulates for the engine."""
    run = simulate(replace(plan, profile=with_request_ms(plan.profile, 0.0)), requests)
    expected_ms = float(np.median([record.ttft_ms for record in run.answered]))
    return round(max(0.0, float(waited_ms) - expected_ms), 3)


def captured_wait_ms(requests: Sequence[PlannedRequest]) -> float:
    """The median time to the first tokens of captured requests, in ms.

    Raises:
        ConfigError: the trace does not record it.
    """
    waited = [one.was_first_s for one in requests if one.was_first_s is not None]
    if not waited:
        raise ConfigError("--captured: the trace lacks the times of first tokens (was_first_s); capture it again")
    return float(np.median(waited)) * 1e3
