"""What a server does with so many requests at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.overload.goodput import goodput
from bench.serve.objective import Objective
from bench.serve.serve_report import ServeReport

KNEE = 0.05  # of the best rate that a level may be short of and still be at the peak


@dataclass(frozen=True, slots=True)
class Level:
    """``report`` of a closed loop with ``at_once``; what counts lies between ``begin_s`` and ``end_s`` of its clock."""

    at_once: int
    report: ServeReport
    begin_s: float
    end_s: float

    def tokens_per_s(self, objectives: Seq[Objective] = ()) -> float:
        """Tokens of answers that kept ``objectives``."""
        return goodput(self.report, objectives, self.begin_s, self.end_s)

    @property
    def requests_per_s(self) -> float:
        """Answers, as many as those tokens are."""
        answered = self.report.answered
        mean = sum(sum(record.chunk_tokens) for record in answered) / max(1, len(answered))
        return self.tokens_per_s() / mean if mean else 0.0


def knee_of(levels: Seq[Level]) -> Level:
    """The least level that is at the peak: more at once wait longer, and get no more done."""
    best = max(level.tokens_per_s() for level in levels)
    return min(
        (level for level in levels if level.tokens_per_s() >= (1 - KNEE) * best), key=lambda level: level.at_once
    )
