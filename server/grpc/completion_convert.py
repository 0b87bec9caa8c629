"""What the completion core says, as CompletionService's messages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from google.rpc.error_details_pb2 import RetryInfo

from server.completion.acceptance import Acceptance
from server.completion.suggestion import Origin, Suggestion
from server.grpc.convert import (
    REASONS,
    delta_message,
    finished_message,
    metrics_message,
    started_message,
    timings_message,
    usage_message,
)
from server.grpc.errors import rich_status, status_code
from server.telemetry.current_call import current_arm
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import result_pb2 as result
from specdec.errors import InvalidRequestError, RequestError
from specdec.types import Delta, Finished, RequestEvent, Started

_ORIGINS = {
    Origin.NEW: pb.SuggestionStarted.ORIGIN_NEW,
    Origin.CONTINUED: pb.SuggestionStarted.ORIGIN_CONTINUED,
    Origin.SHARED: pb.SuggestionStarted.ORIGIN_SHARED,
}


def event_message(event: RequestEvent, request_id: str, model: str) -> pb.CompleteResponse:
    """An event of the engine, for the request that its reader knows it by."""
    if isinstance(event, Delta):
        return pb.CompleteResponse(delta=delta_message(event))
    if isinstance(event, Started):
        started = replace(event, request_id=request_id)
        return pb.CompleteResponse(started=started_message(started, model, current_arm()))
    assert isinstance(event, Finished)  # a run raises what Failed says
    return pb.CompleteResponse(finished=finished_message(event))


def suggestion_started(ask_id: int, suggestion: Suggestion) -> pb.CompleteSessionResponse:
    """The first word about an ask."""
    return pb.CompleteSessionResponse(
        started=pb.SuggestionStarted(
            ask_id=ask_id, suggestion_id=suggestion.suggestion_id, origin=_ORIGINS[suggestion.origin],
            typed_characters=suggestion.typed,
        )
    )  # fmt: skip


def suggestion_delta(ask_id: int, text: str) -> pb.CompleteSessionResponse:
    """More text."""
    return pb.CompleteSessionResponse(delta=pb.SuggestionDelta(ask_id=ask_id, text=text))


def suggestion_finished(ask_id: int, suggestion: Suggestion) -> pb.CompleteSessionResponse:
    """The last word about an ask that came to its end."""
    assert suggestion.reason is not None  # its texts have been read
    message = pb.SuggestionFinished(ask_id=ask_id, finish_reason=REASONS[suggestion.reason])
    end = suggestion.finished
    if end is not None:
        message.usage.CopyFrom(usage_message(end.usage))
        message.metrics.CopyFrom(metrics_message(end.stats))
        message.timings.CopyFrom(timings_message(end.timings))
    return pb.CompleteSessionResponse(finished=message)


def suggestion_dropped(ask_id: int, reason: result.FinishReason.ValueType) -> pb.CompleteSessionResponse:
    """The last word about an ask that did not."""
    return pb.CompleteSessionResponse(finished=pb.SuggestionFinished(ask_id=ask_id, finish_reason=reason))


def ask_refused(ask_id: int, error: RequestError) -> pb.CompleteSessionResponse:
    """An ask that can not be served, as a call's status would tell it."""
    code = status_code(error)
    status = rich_status(code, error)
    message = pb.AskRefused(ask_id=ask_id, code=status.code, reason=error.reason, message=status.message)
    if isinstance(error, InvalidRequestError):
        message.problems.extend(pb.FieldProblem(field=v.field, description=v.description) for v in error.violations)
    for detail in status.details:
        wait = RetryInfo()
        if detail.Unpack(wait):
            message.retry_after_ms = wait.retry_delay.ToTimedelta() / timedelta(milliseconds=1)
    return pb.CompleteSessionResponse(refused=message)


def acceptance_message(figures: Acceptance) -> pb.AcceptanceStats:
    """A session's figures."""
    return pb.AcceptanceStats(
        suggested=figures.suggested, shown=figures.shown, accepted=figures.accepted,
        partially_accepted=figures.partially_accepted, rejected=figures.rejected,
        shown_characters=figures.shown_characters, accepted_characters=figures.accepted_characters,
        shown_ms=figures.shown_ms,
    )  # fmt: skip
