"""The record of a request with several samples."""

from __future__ import annotations

import math

import pytest

from server.experiment.live.recording import record_of
from server.experiment.records import METRICS, Choice, RunClock
from server.observe.metrics import ServerMetrics
from server.observe.records import RequestRecord
from specdec.core.types import Delta, Request, SamplingParams


@pytest.mark.parametrize(
    ("lengths", "tpot_ms"),
    [((11,), 10.0), ((1, 4, 11), 10.0), ((5, 5, 5, 5), 10.0), ((1,), math.nan), ((1, 1), math.nan)],
)
def test_bug_samples_run_side_by_side(lengths: tuple[int, ...], tpot_ms: float) -> None:
    """Every sample gets a token every 10 ms."""
    now_s = 0.0
    request = Request("r", (1,), SamplingParams(n=len(lengths)))
    seen = RequestRecord(request, None, ServerMetrics(), lambda record: None, clock=lambda: now_s)
    for step in range(max(lengths)):
        now_s = 1.0 + step * 0.01
        for sample, length in enumerate(lengths):
            if step < length:
                seen.saw(Delta("r", sample, [7], "a"))
    seen.ended(complete=True)
    record = record_of(Choice("wide"), seen, RunClock(clock=lambda: now_s))
    assert record.tokens == sum(lengths)
    assert METRICS["tpot_ms"].value(record) == pytest.approx(tpot_ms, nan_ok=True)
