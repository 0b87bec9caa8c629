"""How often the analysis finds a difference where there is none, counted on a capture of equal arms."""

from __future__ import annotations

import dataclasses

import numpy as np

from server.experiment.analysis.selection import select
from server.experiment.analysis.targets import compare_target
from server.experiment.config.strict_model import StrictModel
from server.experiment.experiment_errors import ExperimentError
from server.experiment.manifest import Manifest
from server.experiment.record import Record
from server.experiment.record_log import RecordLog
from server.experiment.stats.proportion import share_interval
from server.experiment.stats.quantile_comparison import MIN_UNITS
from server.experiment.stats.special import binomial_ppf


class FalseAlarms(StrictModel):
    """``alarms`` of ``experiments`` found a difference; ``bounds``: the rate's 95 % interval;
    ``most``: more of them have a chance below 2.5 % while alpha is true."""

    label: str
    experiments: int
    units_each: int
    unit_name: str
    alpha: float
    alarms: int
    bounds: tuple[float, float]
    most: int

    @property
    def held(self) -> bool:
        """Whether the alarms are no more than chance explains."""
        return self.alarms <= self.most


def count_false_alarms(manifest: Manifest, log: RecordLog, experiments: int) -> FalseAlarms:
    """Cut the capture into ``experiments`` of consecutive units; analyse each by the plan's primary metric.

    Raises:
        ExperimentError: the capture is too short for as many.
    """
    config, rng = manifest.config, np.random.default_rng(0)
    whole = select(config, log.records)
    each = whole.n_units // experiments
    if each < MIN_UNITS:
        raise ExperimentError(
            f"experiments: {whole.n_units} {whole.unit_name}s make {whole.n_units // MIN_UNITS} experiments of "
            f"{MIN_UNITS} at most, not {experiments}; capture more or ask for fewer"
        )
    alarms = 0
    arms = (_cut(*arm, each, experiments) for arm in zip(whole.records, whole.units, strict=True))
    for a, b in zip(*arms, strict=True):
        piece = dataclasses.replace(whole, records=(a[0], b[0]), units=(a[1], b[1]), n_units=each)
        compared = compare_target(piece, config.primary, config.stopping, config.covariate, rng)
        interval = compared.ratio(config.stopping.alpha)
        alarms += not interval.low <= 1 <= interval.high
    return FalseAlarms(
        label=compared.result.label, experiments=experiments, units_each=each, unit_name=whole.unit_name,
        alpha=config.stopping.alpha, alarms=alarms, bounds=share_interval(alarms, experiments, 0.05),
        most=binomial_ppf(0.975, experiments, config.stopping.alpha),
    )  # fmt: skip


def _cut(records: list[Record], units: list[int], each: int, pieces: int) -> list[tuple[list[Record], list[int]]]:
    """One arm's records by experiment, units counted from 0 in each; what is left over belongs to none."""
    cut: list[tuple[list[Record], list[int]]] = [([], []) for _ in range(pieces)]
    for record, unit in zip(records, units, strict=True):
        piece, within = divmod(unit, each)
        if piece < pieces:
            cut[piece][0].append(record)
            cut[piece][1].append(within)
    return cut
