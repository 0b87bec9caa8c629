"""Which records are analysed, and what belongs together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.experiment_errors import ExperimentError
from server.experiment.metrics import METRICS
from server.experiment.record import NO_BLOCK, Record
from server.experiment.stats.two_arm_sample import TwoArmSample


@dataclass(frozen=True)
class Selection:
    """Records of both arms without warm-up, in order of arrival, and the unit (from 0, following time) of each."""

    records: tuple[list[Record], list[Record]]
    units: tuple[list[int], list[int]]
    n_units: int
    unit_name: str
    pairs: bool
    left_out: dict[str, int]

    def sample(self, metric: str) -> TwoArmSample:
        """The metric's values of requests that ended well; where requests come in pairs, of whole pairs only."""
        return self._filled(metric)[0]

    def with_covariate(self, metric: str) -> tuple[TwoArmSample, tuple[np.ndarray, np.ndarray]]:
        """The sample, and the prompt length of each of its values."""
        sample, kept = self._filled(metric)
        a, b = (np.array([r.prompt_tokens for r in records], float) for records in kept)
        return sample, (a, b)

    def _filled(self, metric: str) -> tuple[TwoArmSample, tuple[list[Record], list[Record]]]:
        value = METRICS[metric].value
        filled = [
            [
                (v, unit, record)
                for record, unit in zip(*arm, strict=True)
                if record.ok and math.isfinite(v := value(record))
            ]
            for arm in zip(self.records, self.units, strict=True)
        ]
        if self.pairs:
            both = {unit for _, unit, _ in filled[0]} & {unit for _, unit, _ in filled[1]}
            filled = [[row for row in arm if row[1] in both] for arm in filled]
        used = sorted({unit for arm in filled for _, unit, _ in arm})
        number = {unit: i for i, unit in enumerate(used)}
        values_a, values_b = (np.array([v for v, _, _ in arm], float) for arm in filled)
        units_a, units_b = (np.array([number[unit] for _, unit, _ in arm], np.int64) for arm in filled)
        kept_a, kept_b = ([record for _, _, record in arm] for arm in filled)
        return TwoArmSample((values_a, values_b), (units_a, units_b), len(used)), (kept_a, kept_b)


def select(config: ExperimentConfig, records: list[Record]) -> Selection:
    """Leave out what the plan does not count, and find the units.

    Raises:
        ExperimentError: requests come in pairs, but a record does not say in which.
    """
    names = (config.control, config.treatment)
    left_out = {
        "of other arms": sum(r.arm not in names for r in records),
        "of callers who chose their arm": sum(r.overridden for r in records if r.arm in names),
    }
    ordered = sorted((r for r in records if r.arm in names and not r.overridden), key=attrgetter("arrival"))
    if config.assignment.pairs:
        for record in ordered:
            if not record.pair:
                raise ExperimentError(f"request {record.request!r} has no pair, which {config.assignment.mode} needs")
    kept: list[list[Record]] = []
    for name in names:
        mine = [r for r in ordered if r.arm == name]
        kept.append([r for i, r in enumerate(mine) if i >= config.warmup_requests and not r.warm_up])
    left_out["of the warm-up"] = len(ordered) - sum(map(len, kept))
    if config.assignment.pairs and all(kept):
        # Of a run that was killed, or of a shadow that was not sent: counting one alone would favour an arm.
        whole = {r.pair for r in kept[0]} & {r.pair for r in kept[1]}
        left_out["of pairs without the other request"] = sum(r.pair not in whole for arm in kept for r in arm)
        kept = [[r for r in arm if r.pair in whole] for arm in kept]
    label, unit_name = _labels(config, ordered)
    number: dict[str, int] = {}
    for record in sorted((r for arm in kept for r in arm), key=attrgetter("arrival")):
        number.setdefault(label(record), len(number))
    units_a, units_b = ([number[label(r)] for r in arm] for arm in kept)
    return Selection((kept[0], kept[1]), (units_a, units_b), len(number), unit_name, config.assignment.pairs, left_out)


def _labels(config: ExperimentConfig, records: list[Record]) -> tuple[attrgetter[str], str]:
    """What tells the unit of a record, and what such a unit is called."""
    mode = config.assignment.mode
    if config.assignment.pairs or (mode == "switchback" and records and all(r.pair for r in records)):
        return attrgetter("pair"), "pair" if config.assignment.pairs else "pair of blocks"
    if mode == "switchback" and any(r.block != NO_BLOCK for r in records):
        return attrgetter("block"), "block"
    if records and all(r.key for r in records):
        return attrgetter("key"), "key"
    return attrgetter("request"), "request"
