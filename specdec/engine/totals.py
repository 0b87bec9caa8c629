"""Counters of an engine: token rate, prefix hits, and sums over its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from specdec.core.types import EngineLoad
from specdec.engine.step import StepResult

HALF_LIFE_S = 5.0  # of the token rate: smooth over bursts of accepted drafts, and current for load balancers


class Throughput:
    """Exponentially decayed token rate; ``hit_tokens`` of ``prompt_tokens`` came from the prefix cache."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self._mass = 0.0
        self._at: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """Count ``tokens`` emitted at ``now`` (monotonic seconds)."""
        self._decay(now)
        self._mass += tokens

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt, ``cached`` tokens of which came from the cache."""
        self.prompt_tokens += tokens
        self.hit_tokens += cached

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


@dataclass(slots=True)
class StepTotals:
    """Sums over steps that computed anything; names as in `EngineLoad`."""

    steps: int = 0
    drafting_steps: int = 0
    step_rows: int = 0
    draft_rows: int = 0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    step_sequences: int = 0
    steps_by_sequences: list[int] = field(default_factory=list)
    steps_by_rows: list[int] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Count a step."""
        if not result.times.rows:
            return
        self.steps += 1
        self.drafting_steps += result.times.draft_rows > 0
        self.step_rows += result.times.rows
        self.draft_rows += result.times.draft_rows
        self.plan_ms += result.plan_ms
        self.draft_ms += result.draft_ms
        self.verify_ms += result.verify_ms
        self.commit_ms += result.commit_ms
        self.step_sequences += result.sequences
        count_power(self.steps_by_sequences, result.sequences)
        count_power(self.steps_by_rows, result.times.rows)

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """``load`` with these sums."""
        sums: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("steps_by_sequences", "steps_by_rows"):
            sums[name] = tuple(sums[name])
        return replace(load, **sums)
