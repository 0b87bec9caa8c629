"""Counters of an engine: token rate, and sums over its steps."""

from __future__ import annotations

import math

from specdec.core.types import EngineLoad
from specdec.engine.step import StepResult

HALF_LIFE_S = 5.0  # of the token rate: smooth over bursts of accepted drafts, and current for load balancers


class Throughput:
    """Exponentially decayed token rate."""

    def __init__(self) -> None:
        self._mass = 0.0
        self._at: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """Count ``tokens`` emitted at ``now`` (monotonic seconds)."""
        self._decay(now)
        self._mass += tokens

    def per_second(self, now: float) -> float:
        """The decayed rate, the mass over the integral of the decay (half-life / ln 2)."""
        self._decay(now)
        return self._mass * math.log(2) / HALF_LIFE_S

    def _decay(self, now: float) -> None:
        if self._at is not None:
            self._mass *= 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self._at = now


def count_power(counts: list[int], value: int) -> None:
    """Count ``value``, from 1, in a histogram whose bucket k holds those in (2^(k-1), 2^k]."""
    power = (value - 1).bit_length()
    counts += [0] * (power + 1 - len(counts))
    counts[power] += 1


def count_step(totals: EngineLoad, result: StepResult) -> None:
    """Add a step that computed anything to the sums in ``totals``."""
    if not result.times.rows:
        return
    totals.steps += 1
    totals.drafting_steps += result.times.draft_rows > 0
    totals.step_rows += result.times.rows
    totals.draft_rows += result.times.draft_rows
    totals.plan_ms += result.plan_ms
    totals.draft_ms += result.draft_ms
    totals.verify_ms += result.verify_ms
    totals.commit_ms += result.commit_ms
    totals.step_sequences += result.sequences
    count_power(totals.steps_by_sequences, result.sequences)
    count_power(totals.steps_by_rows, result.times.rows)
