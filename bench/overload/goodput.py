"""Tokens per second that were worth something."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from bench.serve.objective import Objective
from bench.serve.serve_report import ServeReport


def goodput(report: ServeReport, objectives: Seq[Objective], begin_s: float, end_s: float) -> float:
    """Per second between two times of the run's clock: tokens that came then, of requests that were answered within all
    ``objectives``. Counted as they come, and not with the whole answer, for those that run together end together: how
    many ends fall between two times is chance."""
    good = (record for record in report.answered if all(limit.kept_by(record) for limit in objectives))
    tokens = sum(
        count
        for record in good
        for at_s, count in zip(record.chunk_s, record.chunk_tokens, strict=True)
        if begin_s <= at_s < end_s
    )
    return tokens / max(1e-9, end_s - begin_s)
