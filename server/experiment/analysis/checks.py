"""What makes a run unfit for any conclusion: other outputs, wrong shares, a load generator that lagged."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from server.experiment.analysis.selection import Selection
from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.stats.order_statistics import quantile
from server.experiment.stats.sample_ratio import chi_square_ratio, sequential_ratio

SAMPLE_RATIO_LIMIT = 0.001


class Outputs(NamedTuple):
    """Pairs whose outputs could be compared, and those of them that differ."""

    compared: int
    mismatched: list[str]


def compare_outputs(selection: Selection) -> Outputs:
    """Compare the token hashes of requests that ended well, pair by pair."""
    hashes: dict[str, tuple[set[bytes], set[bytes]]] = defaultdict(lambda: (set(), set()))
    for arm, records in enumerate(selection.records):
        for record in records:
            if record.ok and record.pair and record.token_hash:
                hashes[record.pair][arm].add(record.token_hash)
    both = {pair: a | b for pair, (a, b) in hashes.items() if a and b}
    return Outputs(len(both), [pair for pair, found in both.items() if len(found) > 1])


class SampleRatio(NamedTuple):
    """Units per arm, and how likely such shares are when assignment works."""

    p_value: float
    counts: tuple[int, int]
    unit: str


def sample_ratio(selection: Selection, config: ExperimentConfig) -> SampleRatio:
    """Count what was assigned to an arm as a whole: blocks, keys, or requests."""
    unit = selection.unit_name if selection.unit_name in ("block", "key") else "request"
    first: dict[tuple[int, str], float] = {}
    for arm, records in enumerate(selection.records):
        for record in records:
            first.setdefault((arm, str(getattr(record, unit))), record.arrival)
    arms = np.array([arm for arm, _ in sorted(first, key=first.__getitem__)], np.int64)
    a, b = (int(np.count_nonzero(arms == arm)) for arm in (0, 1))
    weights = [1.0, 1.0] if config.assignment.mode == "switchback" else [arm.weight for arm in config.arms.values()]
    if config.stopping.rule == "always_valid":
        return SampleRatio(sequential_ratio(arms, weights), (a, b), unit)
    return SampleRatio(chi_square_ratio((a, b), weights), (a, b), unit)


def slip_ms(selection: Selection) -> float | None:
    """The 99th percentile of how late requests arrived against their schedule, milliseconds; None without schedule."""
    late = [
        (r.arrival - r.scheduled) * 1e3 for records in selection.records for r in records if r.scheduled is not None
    ]
    return quantile(np.sort(np.array(late)), 0.99) if late else None
