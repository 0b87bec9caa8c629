"""What a server counts of one arm of an experiment."""

from __future__ import annotations

from collections import Counter

from server.metrics.buckets import LATENCY_S
from server.metrics.histogram import Histogram
from server.telemetry.request_record import RequestRecord


class ArmMetrics:
    """As `ServerMetrics` has them of all requests; to look at while an experiment runs, not to judge it by."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter(complete=0, failed=0, left=0)
        self.ttft, self.tpot, self.e2e = (Histogram(LATENCY_S) for _ in range(3))

    def request_ended(self, record: RequestRecord, how: str) -> None:
        """A request of the arm ended."""
        self.requests[how] += 1
        if record.ttft_s is not None:
            self.ttft.add(record.ttft_s)
        for sample in record.samples.values():
            if (tpot := sample.seconds_per_token) is not None:
                self.tpot.add(tpot)
        if how == "complete":
            self.e2e.add(record.ended_s - record.began_s)
