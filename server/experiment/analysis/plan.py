"""How large an experiment has to be."""

from __future__ import annotations

import math

import numpy as np

from server.experiment.analysis.redraw import Redraw
from server.experiment.analysis.selection import select
from server.experiment.config.metric_target import MetricTarget
from server.experiment.config.stopping import Stopping
from server.experiment.config.strict_model import StrictModel
from server.experiment.experiment_errors import ExperimentError
from server.experiment.manifest import Manifest
from server.experiment.record_log import RecordLog
from server.experiment.stats.block_length import sample_block_length
from server.experiment.stats.interval import Interval
from server.experiment.stats.mean_comparison import compare_means
from server.experiment.stats.mean_sequence import mean_ratio_bounds
from server.experiment.stats.proportion import share_interval
from server.experiment.stats.quantile_comparison import MIN_UNITS, compare_quantiles
from server.experiment.stats.quantile_sequence import quantile_ratio_bounds
from server.experiment.stats.special import normal_ppf
from server.experiment.stats.two_arm_sample import TwoArmSample

_ROUNDS = 5
_DRAWS = 400
_LARGEST = 200_000
_SEED = 20250102


class Plan(StrictModel):
    """``units`` (pairs, blocks, keys) find a change of ``effect`` in ``label`` with chance ``power``, as seen in
    simulated experiments; ``power_bounds`` is its 95 % interval. ``seconds`` is how long the capture took for as many.
    """

    label: str
    effect: float
    rule: str
    units: int
    unit_name: str
    merged: int
    power: float
    power_bounds: tuple[float, float]
    wanted: float
    seconds: float
    captured_units: int


def make_plan(
    manifest: Manifest,
    log: RecordLog,
    target: MetricTarget,
    stopping: Stopping,
    effect: float,
    wanted: float,
    simulations: int = 200,
) -> Plan:
    """Find the number of units at which simulated experiments, drawn from a capture in which both arms were the same
    and with B lower by ``effect``, have the ``wanted`` power. The start is the normal formula; the rest is simulation.

    Raises:
        ExperimentError: the capture is too small, or no feasible number is large enough.
    """
    rng = np.random.default_rng(_SEED)
    selection = select(manifest.config, log.records)
    sample = selection.sample(target.metric)
    merged = sample_block_length(sample, target.quantile)
    captured = sample.n_units
    sample = sample.merged(merged)
    if sample.n_units < 2 * MIN_UNITS:
        raise ExperimentError(
            f"the capture has {captured} {selection.unit_name}s with {target.metric}, {merged} of which count as one: "
            f"too few to plan from; record {2 * MIN_UNITS * merged} or more"
        )
    redraw = Redraw(sample)
    units = _first_guess(sample, target, stopping, effect, wanted, rng)
    z = normal_ppf(1 - stopping.alpha / 2)
    found: dict[int, float] = {}
    for _ in range(_ROUNDS):
        found[units] = _power(redraw, units, target, stopping, effect, simulations, rng)
        if found[units] >= wanted and found[units] <= wanted + 0.05:
            break
        seen = min(max(found[units], 0.02), 0.995)
        factor = ((z + normal_ppf(wanted + 0.02)) / max(0.2, z + normal_ppf(seen))) ** 2
        units = max(2 * MIN_UNITS, math.ceil(units * min(4.0, max(0.4, factor))))
        if units in found:
            break
        if units * merged > _LARGEST:
            raise ExperimentError(
                f"more than {_LARGEST} {selection.unit_name}s would be needed to see {effect:.1%} in {target.label}; "
                "look for a larger effect, a lower quantile, or record a quieter capture"
            )
    enough = [n for n, power in found.items() if power >= wanted]
    units = min(enough) if enough else max(found)
    bounds = share_interval(round(found[units] * simulations), simulations, 0.05)
    times = [record.arrival for records in selection.records for record in records]
    return Plan(
        label=target.label,
        effect=effect,
        rule=stopping.rule,
        units=units * merged,
        unit_name=selection.unit_name,
        merged=merged,
        power=found[units],
        power_bounds=(bounds.low, bounds.high),
        wanted=wanted,
        seconds=(max(times) - min(times)) * units * merged / captured,
        captured_units=captured,
    )


def _first_guess(
    sample: TwoArmSample,
    target: MetricTarget,
    stopping: Stopping,
    effect: float,
    wanted: float,
    rng: np.random.Generator,
) -> int:
    """n = N (s (z_{1 - alpha / 2} + z_power) / log(1 - effect))^2, s the error that N units gave the log ratio."""
    low, high = _ratio(sample, target, Stopping(alpha=0.32), rng)
    if low <= 0 or not math.isfinite(high):
        return 2 * sample.n_units
    error = max(math.log(high / low) / (2 * normal_ppf(0.84)), 1e-9)
    needed = (error * (normal_ppf(1 - stopping.alpha / 2) + normal_ppf(wanted)) / math.log1p(-effect)) ** 2
    factor = 3 if stopping.rule == "always_valid" else 1
    return min(_LARGEST, max(2 * MIN_UNITS, math.ceil(factor * needed * sample.n_units)))


def _power(
    redraw: Redraw,
    units: int,
    target: MetricTarget,
    stopping: Stopping,
    effect: float,
    simulations: int,
    rng: np.random.Generator,
) -> float:
    """The share of simulated experiments whose interval lies below 1."""
    tuned = stopping.model_copy(update={"expected_units": units})
    hits = sum(_ratio(redraw.draw(units, 1 - effect, rng), target, tuned, rng).high < 1 for _ in range(simulations))
    return hits / simulations


def _ratio(sample: TwoArmSample, target: MetricTarget, stopping: Stopping, rng: np.random.Generator) -> Interval:
    always = stopping.rule == "always_valid"
    if target.quantile is None:
        mean = compare_means(sample)
        return (
            mean_ratio_bounds(mean, stopping.alpha, stopping.expected_units) if always else mean.ratio(stopping.alpha)
        )
    if always:
        return quantile_ratio_bounds(sample, target.quantile, stopping.alpha, stopping.expected_units)
    return compare_quantiles(sample, [target.quantile], _DRAWS, rng)[0].ratio(stopping.alpha)
