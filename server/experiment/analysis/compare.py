"""Selection of the records to analyse, and the comparison of the arms in one metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from server.experiment.analysis.result import Bounds, TargetResult
from server.experiment.config import ExperimentConfig, MetricTarget, Stopping
from server.experiment.records import METRICS, NO_BLOCK, ExperimentError, Record
from server.experiment.stats.means import MeanComparison, compare_means, mean_ratio_bounds
from server.experiment.stats.quantiles import (
    QuantileComparison,
    compare_quantiles,
    quantile_ratio_bounds,
    unit_quantiles,
)
from server.experiment.stats.samples import Interval, TwoArmSample, sample_block_length


@dataclass(frozen=True)
class Selection:
    """Records of both arms without warm-up, in order of arrival, and the unit (from 0, in time order) of each."""

    records: tuple[list[Record], list[Record]]
    units: tuple[list[int], list[int]]
    n_units: int
    unit_name: str
    left_out: dict[str, int]
    turn: int  # consecutive units that ran together

    def merged(self, sample: TwoArmSample, p: float | None) -> int:
        """How many consecutive units count as one: those of a turn, or of several whole turns that are correlated."""
        return -(-sample_block_length(sample, p) // self.turn) * self.turn

    def sample(self, metric: str) -> TwoArmSample:
        """The metric's values of successful requests; of paired requests, whole pairs only."""
        value, paired = METRICS[metric].value, self.unit_name == "pair"
        return self._sample(lambda record: value(record) if record.ok else math.nan, whole_pairs=paired)

    def failures(self) -> TwoArmSample:
        """1 for each request that failed, 0 for each that succeeded; without those that their callers cancelled."""
        return self._sample(lambda record: math.nan if record.cancelled else float(record.failed), whole_pairs=False)

    def _sample(self, value: Callable[[Record], float], *, whole_pairs: bool) -> TwoArmSample:
        """The values of all records but those of which ``value`` is NaN."""
        filled = [
            [(v, unit) for record, unit in zip(*arm, strict=True) if math.isfinite(v := value(record))]
            for arm in zip(self.records, self.units, strict=True)
        ]
        if whole_pairs:
            both = {unit for _, unit in filled[0]} & {unit for _, unit in filled[1]}
            filled = [[row for row in arm if row[1] in both] for arm in filled]
        # A unit without values leaves a gap in its turn: without it, the later turns would begin at other units.
        used = sorted({unit // self.turn for arm in filled for _, unit in arm})
        begin = {turn: i * self.turn for i, turn in enumerate(used)}
        values_a, values_b = (np.array([v for v, _ in arm], float) for arm in filled)
        units_a, units_b = (
            np.array([begin[unit // self.turn] + unit % self.turn for _, unit in arm], np.int64) for arm in filled
        )
        return TwoArmSample((values_a, values_b), (units_a, units_b), len(used) * self.turn)


def select(config: ExperimentConfig, records: list[Record]) -> Selection:
    """Exclude what the plan does not count, and find the units.

    Raises:
        ExperimentError: the mode needs pairs, but a record has none.
    """
    left_out = {"callers who chose their arm": sum(r.overridden for r in records)}
    ordered = sorted((r for r in records if not r.overridden), key=attrgetter("arrival"))
    if config.assignment.pairs:
        for record in ordered:
            if not record.pair:
                raise ExperimentError(f"request {record.request!r} has no pair, which {config.assignment.mode} needs")
    kept: list[list[Record]] = []
    for name in config.arms:
        mine = [r for r in ordered if r.arm == name]
        kept.append([r for i, r in enumerate(mine) if i >= config.warmup_requests and not r.warm_up])
    left_out["warm-up"] = len(ordered) - sum(map(len, kept))
    if config.assignment.pairs and all(kept):
        # A killed run may leave half a pair, which would favour one arm.
        whole = {r.pair for r in kept[0]} & {r.pair for r in kept[1]}
        left_out["pairs without the other request"] = sum(r.pair not in whole for arm in kept for r in arm)
        kept = [[r for r in arm if r.pair in whole] for arm in kept]
    unit_name = _unit_name(config, ordered)
    label = attrgetter(unit_name)
    number: dict[str, int] = {}
    for record in sorted((r for arm in kept for r in arm), key=attrgetter("arrival")):
        number.setdefault(label(record), len(number))
    units_a, units_b = ([number[label(r)] for r in arm] for arm in kept)
    turn = config.load.turn if config.assignment.pairs else 1
    return Selection((kept[0], kept[1]), (units_a, units_b), len(number), unit_name, left_out, turn)


def _unit_name(config: ExperimentConfig, records: list[Record]) -> str:
    """The attribute that identifies a record's unit."""
    if config.assignment.pairs:
        return "pair"
    if config.assignment.mode == "switchback" and any(r.block != NO_BLOCK for r in records):
        return "block"
    return "key" if records and all(r.key for r in records) else "request"


_WORK = 40_000_000  # values times draws

Ratio = Callable[[float], Interval]
"""Returns the interval for B / A at a level alpha."""


class Compared(NamedTuple):
    """A result, and the interval of the ratio at any level under the plan's stopping rule."""

    result: TargetResult
    ratio: Ratio


def compare_target(
    selection: Selection, target: MetricTarget, stopping: Stopping, rng: np.random.Generator
) -> Compared:
    nothing: Bounds = (None, None)
    if target.quantile is not None:
        sample, [compared], merged = quantiles_of(selection, target.metric, [target.quantile], rng)
        result = quantile_result(target.metric, sample, compared, merged, stopping.alpha)
        if stopping.rule != "always_valid":
            return Compared(result, compared.ratio)
        independent = sample.merged(merged)
        a, b = unit_quantiles(independent, target.quantile)
        ratio = partial(quantile_ratio_bounds, independent, target.quantile, tuned_for=stopping.expected_units / merged)
        estimates = {
            "a": number(a), "b": number(b), "ratio": number(b / a) if a else None, "difference": number(b - a),
            "a_bounds": nothing, "b_bounds": nothing, "difference_bounds": nothing,
            "ratio_bounds": bounds(ratio(stopping.alpha)),
        }  # fmt: skip
        return Compared(result.model_copy(update=estimates), ratio)
    sample = selection.sample(target.metric)
    merged = selection.merged(sample, None)
    mean = compare_means(sample.merged(merged))
    mean_ratio: Ratio = mean.ratio
    if stopping.rule == "always_valid":
        mean_ratio = partial(mean_ratio_bounds, mean, tuned_for=stopping.expected_units / merged)
    result = _result(target, sample, mean, merged, stopping.alpha, (nothing, nothing))
    return Compared(result, mean_ratio)


def quantiles_of(
    selection: Selection, metric: str, at: list[float], rng: np.random.Generator
) -> tuple[TwoArmSample, list[QuantileComparison], int]:
    """Several quantiles from the same draws, their sample, and the number of consecutive units merged into one."""
    sample = selection.sample(metric)
    merged = max(selection.merged(sample, p) for p in {0.5, at[0]})
    draws = max(1000, min(2000, _WORK // max(1, sum(sample.sizes))))  # fewer where it would take minutes
    return sample, compare_quantiles(sample.merged(merged), at, draws, rng), merged


def quantile_result(
    metric: str, sample: TwoArmSample, compared: QuantileComparison, merged: int, alpha: float
) -> TargetResult:
    """The comparison as a result of level 1 - alpha."""
    arms = (bounds(compared.of_arm(0, alpha)), bounds(compared.of_arm(1, alpha)))
    return _result(MetricTarget(metric=metric, quantile=compared.p), sample, compared, merged, alpha, arms)


def bounds(interval: Interval) -> Bounds:
    """The interval for JSON."""
    return number(interval.low), number(interval.high)


def number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _result(
    target: MetricTarget,
    sample: TwoArmSample,
    compared: MeanComparison | QuantileComparison,
    merged: int,
    alpha: float,
    arms: tuple[Bounds, Bounds],
) -> TargetResult:
    metric = METRICS[target.metric]
    return TargetResult(
        label=target.label,
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
        units=min(sample.units_by_arm()),
        merged=merged,
    )
