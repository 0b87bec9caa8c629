"""What an analysis found: the contents of `result.json`, which the report shows, and the exit code for a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from server.experiment.config import StrictModel
from server.experiment.records import ExperimentError

VerdictKind = Literal["better", "worse", "equivalent", "undecided", "invalid"]


class Verdict(StrictModel):
    """``headline`` is one sentence; ``reasons`` say what it rests on."""

    kind: VerdictKind
    headline: str
    reasons: tuple[str, ...] = ()


Demand = Literal["better", "not-worse", "none"]

_CODES: tuple[tuple[VerdictKind, int], ...] = (
    ("better", 13),
    ("equivalent", 13),
    ("worse", 10),
    ("undecided", 11),
    ("invalid", 12),
)
FALSE_ALARMS = 14
"""`specdec ab check` found more differences between equal arms than chance explains."""


def exit_code(kind: VerdictKind, demand: Demand) -> int:
    """0 when the verdict is what was demanded: `better`, or `not-worse` (better or equivalent). Else 10 for worse, 11
    undecided, 12 invalid, 13 equivalent where better was demanded. `none` demands only that the run was valid."""
    wanted: dict[Demand, tuple[VerdictKind, ...]] = {
        "better": ("better",),
        "not-worse": ("better", "equivalent"),
        "none": ("better", "equivalent", "worse", "undecided"),
    }
    return 0 if kind in wanted[demand] else dict(_CODES)[kind]


Bounds = tuple[float | None, float | None]
"""An interval as JSON has it: None where it is not bounded."""


class TargetResult(StrictModel):
    """``a`` is the control's. Intervals have the plan's level, one each; None where there were no values."""

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
    merged: int = 1  # consecutive units that were taken as one, because they depend on each other
    variance_left: float | None = None  # by CUPED; None: not applied


class GuardrailResult(StrictModel):
    """``held``: an increase beyond the limit is ruled out; ``broken``: it is shown; ``open``: neither."""

    label: str
    state: Literal["held", "open", "broken"]
    limit: float
    increase: float | None
    bounds: Bounds
    text: str


class ArmResult(StrictModel):
    """Counts over the requests that were analysed; ``accepted[k]``: verify steps that accepted k draft tokens."""

    name: str
    settings: dict[str, str]
    requests: int
    failed: int
    reasons: dict[str, int]
    tokens: int
    cached_tokens: int
    accepted: tuple[int, ...]


class Curves(StrictModel):
    """Of the primary metric. ``ecdf_a`` and ``ecdf_b`` are its quantiles at (i + 0.5) / n; ``bands`` the half heights
    of their bands. ``differences`` are B - A at the chances ``at``. ``timeline`` holds per stretch of time the seconds
    since the start and the medians of both arms."""

    ecdf_a: tuple[float, ...] = ()
    ecdf_b: tuple[float, ...] = ()
    bands: tuple[float, float] = (1.0, 1.0)
    at: tuple[float, ...] = ()
    differences: tuple[float, ...] = ()
    difference_bounds: tuple[Bounds, ...] = ()
    timeline: tuple[tuple[float, float | None, float | None], ...] = ()


class Result(StrictModel):
    """Plain values only; the same records give the same result."""

    name: str
    mode: str
    rule: str
    alpha: float
    min_effect: float
    started: str
    facts: dict[str, str]
    verdict: Verdict
    primary: TargetResult
    decided_by: tuple[float | None, float | None]  # the interval of the ratio that the verdict rests on
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

    @classmethod
    def read(cls, path: Path) -> Result:
        """Raises ExperimentError: there is none, or it is of another version."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            message = f"{path}: cannot be read ({error.strerror}); run `specdec ab analyze` first"
            raise ExperimentError(message) from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            message = (
                f"{path}: not a result of this version ({where}: {problem['msg']}); run `specdec ab analyze` again"
            )
            raise ExperimentError(message) from None
