"""Compares the arms in one metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from server.experiment.analysis.selection import Selection
from server.experiment.analysis.target_result import Bounds, TargetResult
from server.experiment.config.metric_target import MetricTarget
from server.experiment.config.stopping import Stopping
from server.experiment.metrics import METRICS
from server.experiment.stats.block_length import sample_block_length
from server.experiment.stats.comparison import Comparison
from server.experiment.stats.cuped import adjust_means
from server.experiment.stats.interval import Interval
from server.experiment.stats.mean_comparison import MeanComparison, compare_means
from server.experiment.stats.mean_sequence import mean_ratio_bounds
from server.experiment.stats.quantile_comparison import QuantileComparison, compare_quantiles
from server.experiment.stats.quantile_sequence import quantile_ratio_bounds
from server.experiment.stats.two_arm_sample import TwoArmSample

_WORK = 40_000_000

Ratio = Callable[[float], Interval]
"""Gives the interval for B / A at a level alpha."""


class Compared(NamedTuple):
    """A result, and the interval of the ratio at any level under the plan's stopping rule."""

    result: TargetResult
    ratio: Ratio


def draws_for(sample: TwoArmSample) -> int:
    """How often to resample: 2000 times, less for so many values that it would take minutes."""
    return max(1000, min(2000, _WORK // max(1, sum(sample.sizes))))


def compare_target(
    selection: Selection, target: MetricTarget, stopping: Stopping, covariate: str | None, rng: np.random.Generator
) -> Compared:
    """One target. CUPED is applied to means unless requests come in pairs, which removes more."""
    if target.quantile is not None:
        sample, [compared], merged = quantiles_of(selection, target.metric, [target.quantile], rng)
        ratio: Ratio = compared.ratio
        if stopping.rule == "always_valid":
            ratio = _always_quantile(sample.merged(merged), target.quantile, stopping.expected_units / merged)
        result = quantile_result(target.metric, sample, compared, merged, stopping.alpha)
        return Compared(result, ratio)
    sample, covariates = selection.with_covariate(target.metric)
    left = None
    if covariate is not None and not selection.pairs:
        sample, left = adjust_means(sample, covariates)
    merged = sample_block_length(sample, None)
    mean = compare_means(sample.merged(merged))
    mean_ratio: Ratio = mean.ratio
    if stopping.rule == "always_valid":
        mean_ratio = _always_mean(mean, stopping.expected_units / merged)
    nothing: Bounds = (None, None)
    result = _result(target.label, sample, mean, merged, stopping.alpha, (nothing, nothing), left)
    return Compared(result, mean_ratio)


def quantiles_of(
    selection: Selection, metric: str, at: list[float], rng: np.random.Generator
) -> tuple[TwoArmSample, list[QuantileComparison], int]:
    """Several quantiles from the same draws; also the sample, and how many of its units were taken as one."""
    sample = selection.sample(metric)
    merged = max(sample_block_length(sample, p) for p in {0.5, at[0]})
    return sample, compare_quantiles(sample.merged(merged), at, draws_for(sample), rng), merged


def quantile_result(
    metric: str, sample: TwoArmSample, compared: QuantileComparison, merged: int, alpha: float
) -> TargetResult:
    """The comparison as a result of level 1 - alpha."""
    label = MetricTarget(metric=metric, quantile=compared.p).label
    arms = (bounds(compared.of_arm(0, alpha)), bounds(compared.of_arm(1, alpha)))
    return _result(label, sample, compared, merged, alpha, arms, None)


def bounds(interval: Interval) -> Bounds:
    """The interval as JSON has it."""
    return number(interval.low), number(interval.high)


def number(value: float) -> float | None:
    """A finite number, else None."""
    return float(value) if math.isfinite(value) else None


def _always_mean(mean: MeanComparison, tuned_for: float) -> Ratio:
    return lambda alpha: mean_ratio_bounds(mean, alpha, tuned_for)


def _always_quantile(sample: TwoArmSample, p: float, tuned_for: float) -> Ratio:
    return lambda alpha: quantile_ratio_bounds(sample, p, alpha, tuned_for)


def _result(
    label: str,
    sample: TwoArmSample,
    compared: Comparison,
    merged: int,
    alpha: float,
    arms: tuple[Bounds, Bounds],
    variance_left: float | None,
) -> TargetResult:
    metric = METRICS[label.partition("@")[0].removesuffix(":mean")]
    present = sample.present()
    return TargetResult(
        label=label,
        title=metric.title,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        sizes=sample.sizes,
        a=number(compared.a),
        b=number(compared.b),
        a_bounds=arms[0],
        b_bounds=arms[1],
        ratio=number(compared.b / compared.a) if compared.a else None,
        ratio_bounds=bounds(compared.ratio(alpha)),
        difference=number(compared.b - compared.a),
        difference_bounds=bounds(compared.difference(alpha)),
        p_value=compared.p_value(),
        units=min(int(np.count_nonzero(units)) for units in present),
        merged=merged,
        variance_left=variance_left,
    )
