"""A limit that a request has to keep to count as good."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.serve.record import Record
from specdec.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Objective:
    """``metric``: one of `METRICS`; "itl" is the longest time between two messages of the answer."""

    metric: str
    limit_ms: float

    @staticmethod
    def read(text: str) -> Objective:
        """From ``metric:milliseconds``.

        Raises:
            ConfigError: it is not of that form.
        """
        metric, _, limit = text.partition(":")
        try:
            limit_ms = float(limit)
        except ValueError:
            limit_ms = math.nan
        if metric not in METRICS or not limit_ms > 0:
            raise ConfigError(f"goodput: {text!r} is not METRIC:MILLISECONDS with one of {', '.join(METRICS)}")
        return Objective(metric, limit_ms)

    def kept_by(self, record: Record) -> bool:
        """Whether an answered request keeps it; one without the figure (a single token has no tpot) does."""
        share = self.share_of(record)
        return share is None or share <= 1.0

    def share_of(self, record: Record) -> float | None:
        """An answered request's figure over the limit; None where it has no such figure."""
        if self.metric == "itl":
            return max(record.gaps_ms, default=0.0) / self.limit_ms
        value: float | None = getattr(record, f"{self.metric}_ms")
        return None if value is None else value / self.limit_ms

    def __str__(self) -> str:
        return f"{self.metric}:{self.limit_ms:g}"
