"""What the controller itself takes, per step, by how many sequences ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specdec.engine.engine import Engine

ALL = 1_000_000  # more steps than any trace keeps
MIN_STEPS = 16


class ControlRow(NamedTuple):
    """Milliseconds over ``steps`` steps with so many ``sequences``."""

    sequences: int
    steps: int
    median_ms: float
    p99_ms: float


@dataclass(slots=True)
class ControlTimes:
    """Reads `StepTrace.control_ms` from an engine's decision trace. ``by_sequences``: milliseconds of every step."""

    by_sequences: dict[int, list[float]] = field(default_factory=dict)
    _seen: int = -1

    def collect(self, engine: Engine) -> None:
        """Steps since the last call count, as far as the engine still has them."""
        for trace in engine.trace(ALL):
            if trace.step > self._seen and trace.sequences:
                self.by_sequences.setdefault(trace.sequences, []).append(trace.control_ms)
            self._seen = max(self._seen, trace.step)

    def rows(self) -> Iterator[ControlRow]:
        """By rising number of sequences, those seen often enough."""
        for sequences, times in sorted(self.by_sequences.items()):
            if len(times) >= MIN_STEPS:
                median, p99 = np.percentile(times, (50, 99))
                yield ControlRow(sequences, len(times), float(median), float(p99))

    def as_dict(self) -> list[dict[str, Any]]:
        """JSON-able figures."""
        return [{**row._asdict(), "median_ms": round(row.median_ms, 4), "p99_ms": round(row.p99_ms, 4)}
                for row in self.rows()]  # fmt: skip
