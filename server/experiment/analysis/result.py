"""The result of an analysis (`result.json`), and the exit code of a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from server.experiment.config import StrictModel

VerdictKind = Literal["better", "worse", "equivalent", "undecided", "invalid"]


class Verdict(StrictModel):
    """``headline`` is one sentence; ``reasons`` are the evidence."""

    kind: VerdictKind
    headline: str
    reasons: tuple[str, ...] = ()


Demand = Literal["better", "not-worse", "none"]

_CODES: dict[VerdictKind, int] = {"better": 13, "equivalent": 13, "worse": 10, "undecided": 11, "invalid": 12}
OPEN_GUARDRAIL = 15


def exit_code(kind: VerdictKind, demand: Demand, guardrails: Sequence[GuardrailResult] = ()) -> int:
    """0 if the verdict meets the demand: `better`, or `not-worse` (better or equivalent), and no guardrail is open.
    Else 10 for worse, 11 undecided, 12 invalid, 13 equivalent if better was demanded, 15 for an open guardrail. `none`
    demands only a valid run."""
    wanted: dict[Demand, tuple[VerdictKind, ...]] = {
        "better": ("better",),
        "not-worse": ("better", "equivalent"),
        "none": ("better", "equivalent", "worse", "undecided"),
    }
    if kind not in wanted[demand]:
        return _CODES[kind]
    is_open = demand != "none" and any(guardrail.state == "open" for guardrail in guardrails)
    return OPEN_GUARDRAIL if is_open else 0


Bounds = tuple[float | None, float | None]
"""An interval in JSON; None: unbounded."""


class TargetResult(StrictModel):
    """One metric in both arms. Intervals have the plan's level, each by itself; None without values."""

    label: str
    title: str
    unit: str
    lower_is_better: bool
    sizes: tuple[int, int]
    a: float | None
    b: float | None
    a_bounds: Bounds
    b_bounds: Bounds
    ratio: float | None
    ratio_bounds: Bounds
    difference: float | None
    difference_bounds: Bounds
    p_value: float
    p_adjusted: float | None = None  # Holm's, among the secondary metrics
    units: int = 0
    merged: int = 1  # consecutive units that count as one, because they are correlated


class GuardrailResult(StrictModel):
    """``held``: a change for the worse beyond the limit is ruled out; ``broken``: it is shown; ``open``: neither."""

    label: str
    state: Literal["held", "open", "broken"]
    limit: float
    increase: float | None
    bounds: Bounds
    text: str


class ArmResult(StrictModel):
    """Counts over the analysed requests of an arm."""

    name: str
    settings: dict[str, str]
    requests: int
    failed: int
    reasons: dict[str, int]
    tokens: int
    cached_tokens: int
    accepted: tuple[int, ...]  # [k]: verify steps that accepted k draft tokens


class Curves(StrictModel):
    ecdf_a: tuple[float, ...] = ()  # quantiles of the control at (i + 0.5) / n
    ecdf_b: tuple[float, ...] = ()  # and of the treatment
    bands: tuple[float, float] = (1.0, 1.0)  # half heights of the confidence bands of both
    timeline: tuple[tuple[float, float | None, float | None], ...] = ()  # seconds since the start, medians of the arms


class Result(StrictModel):
    """The same records always give the same result."""

    name: str
    mode: str
    rule: str
    alpha: float
    min_effect: float
    started: str
    facts: dict[str, str]
    verdict: Verdict
    primary: TargetResult
    decided_by: tuple[float | None, float | None]  # interval of the ratio that decides the verdict
    secondary: tuple[TargetResult, ...]
    table: tuple[TargetResult, ...]
    guardrails: tuple[GuardrailResult, ...]
    arms: tuple[ArmResult, ArmResult]
    sample_ratio_p: float
    sample_ratio_counts: tuple[int, int]
    sample_ratio_unit: str
    compared_outputs: int
    mismatched_outputs: int
    curves: Curves
    notes: tuple[str, ...]
