"""The requests in flight: their unfinished samples, and the events that the next `Engine.step` returns."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from draft.prediction import PredictionDrafter
from specdec.core.sequence import Ending, Sequence
from specdec.core.types import (
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    Started,
    Usage,
)


class RequestTable:
    """Requests by id, from submission to their last event."""

    def __init__(self) -> None:
        self.live: dict[str, list[Sequence]] = {}
        """By request id, the samples that have not finished."""
        self._unstarted: set[str] = set()
        self._events: list[RequestEvent] = []

    def __bool__(self) -> bool:
        return bool(self.live or self._events)

    def add(self, request: Request, sequences: Seq[Sequence]) -> None:
        """Enter a request with all of its samples."""
        self.live[request.request_id] = list(sequences)
        self._unstarted.add(request.request_id)

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished samples; they may finish during the iteration."""
        return iter([sequence for sequences in self.live.values() for sequence in sequences])

    def remove(self, sequence: Sequence) -> None:
        """Take out a sample that has ended."""
        request_id = sequence.request.request_id
        samples = self.live[request_id]
        samples.remove(sequence)
        if not samples:
            del self.live[request_id]
            self._unstarted.discard(request_id)

    def publish(self, event: RequestEvent) -> None:
        """Return ``event`` from the next step."""
        self._events.append(event)

    def publish_held_text(self, sequence: Sequence) -> None:
        """Publish text that the sequence held back, if there is any."""
        if (rest := sequence.held_back()).text:
            self._events.append(rest)

    def start(self, sequence: Sequence, fingerprint: str, prompt_digest: str) -> bool:
        """Publish `Started` with a request's first sample that is scheduled. False: it was published before."""
        request, seed = sequence.request, sequence.request.sampling.seed
        if request.request_id not in self._unstarted:
            return False
        self._unstarted.remove(request.request_id)
        assert seed is not None  # `Engine.submit` draws one
        scheduled_s = sequence.first_scheduled_s or sequence.arrival_s
        self._events.append(
            Started(
                request.request_id,
                seed,
                sequence.n_prompt,
                sequence.cached_tokens,
                queue_ms=(scheduled_s - sequence.arrival_s) * 1e3,
                numeric_fingerprint=fingerprint,
                resumed_tokens=sequence.n_resumed,
                prompt_digest=prompt_digest,
            )
        )
        return True

    def finish(self, sequence: Sequence, ending: Ending, now: float) -> None:
        """Publish `Finished` for a sample that was removed at ``now`` (monotonic seconds)."""
        first = now if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        token = now if sequence.first_token_s is None else sequence.first_token_s
        timings = sequence.timings
        timings.queue_ms = (first - sequence.arrival_s) * 1e3
        timings.prefill_ms = (token - first) * 1e3
        timings.decode_ms = (now - token) * 1e3
        request_id, stop = sequence.request.request_id, ending.matched_stop
        pooler, pooled = sequence.pooler, ending.reason is FinishReason.LENGTH
        embedding = pooler.embedding() if pooler is not None and pooled else b""
        usage = _usage(sequence)
        self._events.append(
            Finished(request_id, sequence.index, ending.reason, stop, usage, sequence.stats, timings, embedding)
        )

    def fail(self, request_id: str, reason: str, message: str, details: Seq[Any] = ()) -> None:
        """Publish `Failed` for a request that has no sequences any more."""
        self._events.append(Failed(request_id, reason, message, list(details)))

    def take_events(self) -> list[RequestEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


def _usage(sequence: Sequence) -> Usage:
    predicted = len(sequence.request.prediction_ids)
    stats = sequence.stats.by_drafter.get(PredictionDrafter.name)
    accepted = 0 if stats is None else min(predicted, stats.num_accepted_draft_tokens)
    prefix_lines, suffix_lines, file_lines, edits = sequence.request.omitted or (0, 0, 0, 0)
    return Usage(
        prompt_tokens=sequence.n_prompt,
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.n_output,
        preemptions=sequence.preemptions,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=predicted - accepted,
        pauses=sequence.pauses,
        resumed_tokens=sequence.n_resumed,
        omitted_prefix_lines=prefix_lines,
        omitted_suffix_lines=suffix_lines,
        omitted_file_lines=file_lines,
        omitted_edits=edits,
    )
