"""Checks what must not get worse."""

from __future__ import annotations

from typing import Literal

import numpy as np

from server.experiment.analysis.guardrail_result import GuardrailResult
from server.experiment.analysis.selection import Selection
from server.experiment.analysis.targets import Compared, bounds, compare_target, number
from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.config.guardrail import Guardrail
from server.experiment.metrics import METRICS
from server.experiment.stats.interval import Interval
from server.experiment.stats.proportion import share_difference, share_difference_bounds

# Twice next to nothing is no increase that anybody would notice.
_NEGLIGIBLE_MS = 0.5


def check_guardrails(
    selection: Selection, config: ExperimentConfig, rng: np.random.Generator
) -> tuple[GuardrailResult, ...]:
    """Each of the plan's guardrails, at the plan's level."""
    return tuple(_check(guardrail, selection, config, rng) for guardrail in config.guardrails)


def _check(
    guardrail: Guardrail, selection: Selection, config: ExperimentConfig, rng: np.random.Generator
) -> GuardrailResult:
    target = guardrail.target
    if target is None:
        hits = _failed(selection, 0), _failed(selection, 1)
        n = len(selection.records[0]), len(selection.records[1])
        always = config.stopping.rule == "always_valid"
        increase = (share_difference_bounds if always else share_difference)(hits, n, config.stopping.alpha)
        seen = hits[1] / n[1] - hits[0] / n[0] if all(n) else 0.0
        text = f"{hits[0]} of {n[0]} requests failed in the control, {hits[1]} of {n[1]} in the treatment"
        return _judged(guardrail, seen, increase, text)
    compared = compare_target(selection, target, config.stopping, config.covariate, rng)
    result = compared.result
    if result.a is None or result.b is None:
        return _judged(guardrail, None, Interval(-np.inf, np.inf), "no request has this number")
    unit = f" {result.unit}" if result.unit else ""
    text = f"{result.a:.4g}{unit} in the control, {result.b:.4g}{unit} in the treatment"
    if result.unit == "ms" and max(result.a, result.b) < _NEGLIGIBLE_MS:
        return _judged(guardrail, 0.0, Interval(0.0, 0.0), text + ": too little to matter")
    interval = _increase(compared, config.stopping.alpha)
    seen_ratio = None if result.ratio is None else result.ratio - 1
    if seen_ratio is not None and not METRICS[target.metric].lower_is_better:
        seen_ratio = -seen_ratio
    return _judged(guardrail, seen_ratio, interval, text)


def _increase(compared: Compared, alpha: float) -> Interval:
    """How much worse it got, as a share of the control's."""
    low, high = compared.ratio(alpha)
    if compared.result.lower_is_better:
        return Interval(low - 1, high - 1)
    return Interval(1 - high, 1 - low)


def _judged(guardrail: Guardrail, increase: float | None, interval: Interval, text: str) -> GuardrailResult:
    state: Literal["held", "open", "broken"] = "open"
    if interval.high <= guardrail.max_increase:
        state = "held"
    elif interval.low > guardrail.max_increase:
        state = "broken"
    return GuardrailResult(
        label=guardrail.metric,
        state=state,
        limit=guardrail.max_increase,
        increase=None if increase is None else number(increase),
        bounds=bounds(interval),
        text=text,
    )


def _failed(selection: Selection, arm: int) -> int:
    return sum(not record.ok for record in selection.records[arm])
