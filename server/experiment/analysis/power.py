"""The size that an experiment needs."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from server.experiment.analysis.compare import select
from server.experiment.config import MetricTarget, Stopping, StrictModel
from server.experiment.folder import Manifest
from server.experiment.records import ExperimentError, RecordLog
from server.experiment.stats.means import compare_means, mean_ratio_bounds
from server.experiment.stats.quantiles import MIN_UNITS, compare_quantiles, quantile_ratio_bounds
from server.experiment.stats.samples import Interval, TwoArmSample


class Redraw:
    """Draws whole units with replacement. Arms are swapped at random (units with both) or assigned at random in their
    recorded proportion (units with one), so that they differ by chance only; then B's values are scaled."""

    def __init__(self, sample: TwoArmSample) -> None:
        units = np.concatenate(sample.units)
        order = np.argsort(units, kind="stable")
        self._values, self._in_b = np.concatenate(sample.values)[order], np.repeat([False, True], sample.sizes)[order]
        self._sizes = np.bincount(units, minlength=sample.n_units)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._strata = sample.strata()

    def draw(self, n_units: int, factor: float, rng: np.random.Generator) -> TwoArmSample:
        """A simulated experiment of ``n_units`` units, with B's values times ``factor``."""
        chosen = rng.choice(np.concatenate(self._strata), n_units)
        sizes = self._sizes[chosen]
        units = np.repeat(np.arange(n_units), sizes)
        # The rows of a unit lie together: its first row, and the place of each among them.
        rows = np.repeat(self._starts[chosen] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(units))
        if len(self._strata) == 1:
            in_b = self._in_b[rows] ^ (rng.random(n_units) < 0.5)[units]
        else:
            # Each by itself, as experiments assign them: of few blocks, an arm may get too few.
            share_b = len(self._strata[1]) / sum(map(len, self._strata))
            in_b = (rng.random(n_units) < share_b)[units]
        values = self._values[rows]
        return TwoArmSample((values[~in_b], values[in_b] * factor), (units[~in_b], units[in_b]), n_units)


_MOST_POWER = 0.999  # that the search aims at
_ROUNDS = 5  # of the search for the number of units
_DRAWS = 400  # of the bootstrap in a simulated experiment
_MAX_UNITS = 200_000
_SEED = 20250102


class SizePlan(StrictModel):
    """The number of units that detects a change of ``effect`` in ``label`` with chance ``power``."""

    label: str
    effect: float
    rule: str
    units: int  # pairs, blocks or keys
    unit_name: str
    merged: int  # consecutive units that count as one
    power: float
    power_bounds: tuple[float, float]  # 95 % interval
    wanted: float
    seconds: float  # duration of as many recorded units
    captured_units: int  # that have the metric
    recorded_units: int


def plan_size(
    manifest: Manifest,
    log: RecordLog,
    target: MetricTarget,
    stopping: Stopping,
    effect: float,
    wanted: float,
    simulations: int = 200,
) -> SizePlan:
    """Find the number of units at which simulated experiments have the ``wanted`` power. Their units are drawn from a
    recorded experiment with equal arms; those of B are lowered by ``effect``. The search starts at the normal formula.

    Raises:
        ExperimentError: the experiment is too small, or no feasible number is large enough.
    """
    rng = np.random.default_rng(_SEED)
    selection = select(manifest.config, log.records)
    sample = selection.sample(target.metric)
    merged = selection.merged(sample, target.quantile)
    captured = sum(map(len, sample.strata()))
    sample = sample.merged(merged)
    if sample.n_units < 2 * MIN_UNITS:
        counted = f", of which {merged} in a row count as one" if merged > 1 else ""
        raise ExperimentError(
            f"there are records of {captured} {selection.unit_name}s with {target.metric}{counted}: "
            f"too few for a plan; record {2 * MIN_UNITS * merged} or more"
        )
    redraw = Redraw(sample)
    units = _first_guess(sample, target, stopping, effect, wanted, rng)
    z = float(stats.norm.ppf(1 - stopping.alpha / 2))
    found: dict[int, float] = {}  # by number of units, the share of simulations whose interval lies below 1
    for _ in range(_ROUNDS):
        tuned = stopping.model_copy(update={"expected_units": units})
        drawn = (redraw.draw(units, 1 - effect, rng) for _ in range(simulations))
        found[units] = sum(_ratio(each, target, tuned, rng).high < 1 for each in drawn) / simulations
        if wanted <= found[units] <= wanted + 0.05:
            break
        seen = min(max(found[units], 0.02), 0.995)
        factor = ((z + stats.norm.ppf(min(wanted + 0.02, _MOST_POWER))) / max(0.2, z + stats.norm.ppf(seen))) ** 2
        units = max(2 * MIN_UNITS, math.ceil(units * min(4.0, max(0.4, factor))))
        if units in found:
            break
        if units * merged > _MAX_UNITS:
            raise ExperimentError(
                f"more than {_MAX_UNITS} {selection.unit_name}s are needed to detect {effect:.1%} in {target.label}; "
                "choose a larger effect, a lower quantile, or record a quieter experiment"
            )
    enough = [n for n, power in found.items() if power >= wanted]
    units = min(enough) if enough else max(found)
    bounds = stats.binomtest(round(found[units] * simulations), simulations).proportion_ci(0.95)
    times = [record.arrival for records in selection.records for record in records]
    return SizePlan(
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
        recorded_units=selection.n_units,
    )


def _first_guess(
    sample: TwoArmSample,
    target: MetricTarget,
    stopping: Stopping,
    effect: float,
    wanted: float,
    rng: np.random.Generator,
) -> int:
    """n = N (s (z_{1 - alpha / 2} + z_power) / log(1 - effect))^2, with s the error of the log ratio over N units."""
    low, high = _ratio(sample, target, Stopping(alpha=0.32), rng)
    if low <= 0 or not math.isfinite(high):
        return 2 * sample.n_units
    error = max(math.log(high / low) / (2 * stats.norm.ppf(0.84)), 1e-9)
    needed = (error * (stats.norm.ppf(1 - stopping.alpha / 2) + stats.norm.ppf(wanted)) / math.log1p(-effect)) ** 2
    factor = 3 if stopping.rule == "always_valid" else 1
    return min(_MAX_UNITS, max(2 * MIN_UNITS, math.ceil(factor * needed * sample.n_units)))


def _ratio(sample: TwoArmSample, target: MetricTarget, stopping: Stopping, rng: np.random.Generator) -> Interval:
    always, alpha, expected = stopping.rule == "always_valid", stopping.alpha, stopping.expected_units
    if target.quantile is None:
        mean = compare_means(sample)
        return mean_ratio_bounds(mean, alpha, expected) if always else mean.ratio(alpha)
    if always:
        return quantile_ratio_bounds(sample, target.quantile, alpha, expected)
    return compare_quantiles(sample, [target.quantile], _DRAWS, rng)[0].ratio(alpha)
