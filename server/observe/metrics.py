"""Counters and histograms of a server, from its calls and the events of its requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from server.errors import WATCHED_FILES, FileErrors
from server.observe.records import CallRecord, RequestRecord, SampleRecord, TelemetryListener
from specdec.core.types import Finished, FinishReason, SpeculationStats, Started

LATENCY_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNK_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SAMPLE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)

OBJECTIVES = TPOT, DEADLINE = "time_per_output_token", "deadline"


class Histogram:
    """Counts values in buckets with ascending upper ``bounds``, inclusive."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @staticmethod
    def by_powers(counts: Sequence[int], top: int, total: float) -> Histogram:
        """A histogram of values counted elsewhere, with bounds up to 2^``top``: ``counts[k]`` values were above 2^(k-1)
        and at most 2^k."""
        found = Histogram([2**k for k in range(top + 1)])
        found._counts[: len(counts)] = counts
        found.total = total
        return found

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus buckets: each bound as text, the last `+Inf`, and the number of values at or below it."""
        found, below = [], 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class ServerMetrics(TelemetryListener):
    """Plain numbers that only grow, except ``calls_open``. Belongs to one event loop. ``target_tpot_ms``: the objective
    of requests that set none."""

    def __init__(self, target_tpot_ms: float = 80.0) -> None:
        self._target_tpot_ms = target_tpot_ms
        self.calls_open = 0
        self.calls: Counter[tuple[str, str, str]] = Counter()  # by protocol, endpoint and status
        self.refusals: Counter[str] = Counter()
        self.requests: Counter[str] = Counter(complete=0, failed=0, left=0)  # by outcome; left: closed, or aborted
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.good_requests = self.good_tokens = 0  # of complete requests that met all their objectives
        self.missed: Counter[str] = Counter(dict.fromkeys(OBJECTIVES, 0))  # complete requests by missed objective
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.preemptions = self.pauses = 0
        self.prediction_accepted = self.prediction_rejected = 0
        self.stats = SpeculationStats()  # of all samples
        self.ttft, self.queue, self.gap, self.tpot = (Histogram(LATENCY_BUCKETS_S) for _ in range(4))
        self.prefill, self.decode, self.inference, self.e2e = (Histogram(LATENCY_BUCKETS_S) for _ in range(4))
        self.call_time = Histogram(LATENCY_BUCKETS_S)
        self.request_prompt, self.request_output = Histogram(TOKEN_BUCKETS), Histogram(TOKEN_BUCKETS)
        self.request_max_tokens, self.request_samples = Histogram(TOKEN_BUCKETS), Histogram(SAMPLE_BUCKETS)
        self.chunk_tokens = Histogram(CHUNK_BUCKETS)
        self.file_errors: FileErrors = Counter(dict.fromkeys(WATCHED_FILES, 0))
        self.suggestions = 0  # code completions with a text, predictions with an edit
        self.suggestion_outcomes: Counter[str] = Counter()  # reports that changed a suggestion's outcome

    def prompt(self, event: Started) -> None:
        self.prompt_tokens += event.prompt_tokens
        self.cached_tokens += event.cached_tokens
        self.queue.add(event.queue_ms / 1e3)
        self.request_prompt.add(event.prompt_tokens)

    def first_tokens(self, ttft_s: float) -> None:
        self.ttft.add(ttft_s)

    def tokens(self, count: int, gap_s: float | None = None) -> None:
        self.output_tokens += count
        self.chunk_tokens.add(count)
        if gap_s is not None:
            self.gap.add(gap_s)

    def sample_finished(self, sample: SampleRecord, event: Finished) -> None:
        usage, timings = event.usage, event.timings
        self.finished[event.reason.value] += 1
        self.preemptions += usage.preemptions
        self.pauses += usage.pauses
        self.prediction_accepted += usage.accepted_prediction_tokens
        self.prediction_rejected += usage.rejected_prediction_tokens
        self.request_output.add(usage.output_tokens - usage.resumed_tokens)
        if usage.output_tokens:
            self.prefill.add(timings.prefill_ms / 1e3)
            self.decode.add(timings.decode_ms / 1e3)
        self.inference.add((timings.prefill_ms + timings.decode_ms) / 1e3)
        if (tpot := sample.seconds_per_token) is not None:
            self.tpot.add(tpot)
        self.stats.add(event.stats)

    def request_ended(self, record: RequestRecord) -> None:
        how = _outcome(record)
        self.requests[how] += 1
        if how != "complete":
            return
        self._judge(record)
        self.e2e.add(record.ended_s - record.began_s)
        self.request_samples.add(record.request.sampling.n)
        if record.request.stopping.max_tokens is not None:
            self.request_max_tokens.add(record.request.stopping.max_tokens)

    def _judge(self, record: RequestRecord) -> None:
        """Check the objectives of a complete request."""
        limit_s = (record.request.target_tpot_ms or self._target_tpot_ms) / 1e3
        slow = any((sample.seconds_per_token or 0.0) > limit_s for sample in record.samples.values())
        late = any(end.reason is FinishReason.DEADLINE for end in record.finished)
        self.missed[TPOT] += slow
        self.missed[DEADLINE] += late
        if not slow and not late:
            self.good_requests += 1
            self.good_tokens += record.output_tokens

    def call_began(self, call: CallRecord) -> None:
        self.calls_open += 1

    def call_ended(self, call: CallRecord) -> None:
        self.calls_open -= 1
        self.calls[call.protocol, call.endpoint, call.status] += 1
        self.call_time.add(call.duration_s)
        if call.reason:
            self.refusals[call.reason] += 1


def _outcome(record: RequestRecord) -> str:
    if record.error is not None:
        return "failed"
    aborted = any(end.reason is FinishReason.ABORTED for end in record.finished)
    return "complete" if record.complete and not aborted else "left"
