"""Messages of CompletionService to requests, and its events to messages."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from dataclasses import replace

from server.completion.documents import FillMode, OffsetUnit
from server.completion.editor_session import Suggestion
from server.completion.next_edit import RECENT_EDITS, EditPlace, EditReader, RecentEdit
from server.completion.outcomes import Outcome
from server.completion.prompt_packer import SMALLEST_BUDGET
from server.completion.requests import DEFAULT_MAX_TOKENS, CompletionOptions
from server.grpc.errors import rich_status
from server.grpc.messages import REASONS, event_message, figures
from server.grpc.request_reader import read_base, read_files
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import result_pb2 as result
from specdec.core.types import Delta, Request, RequestEvent
from specdec.errors import InvalidRequestError, RequestError, ViolationCollector

_MODES = {pb.CompletionOptions.MODE_UNSPECIFIED: FillMode.MIDDLE} | {
    pb.CompletionOptions.Mode.Value(f"MODE_{mode.name}"): mode for mode in FillMode
}
_UNITS = {pb.OFFSET_UNIT_UNSPECIFIED: OffsetUnit.CODE_POINT} | {
    pb.OffsetUnit.Value(f"OFFSET_UNIT_{unit.name}"): unit for unit in OffsetUnit
}
_OUTCOMES = {pb.Outcome.Value(f"OUTCOME_{outcome.name}"): outcome for outcome in Outcome}


def read_options(message: pb.CompleteRequest | pb.SessionSetup, violations: ViolationCollector) -> CompletionOptions:
    """Return the options of a completion; adds to ``violations`` what is wrong with them."""
    made, base = message.completion, _read_greedy(message, violations)
    stopping = base.stopping
    if stopping.max_tokens is None:
        base = replace(base, stopping=replace(stopping, max_tokens=max(DEFAULT_MAX_TOKENS, stopping.min_tokens)))
    violations.check(made.mode in _MODES, "completion.mode", f"unknown value {made.mode}")
    tokens, ttft_ms = read_limits(made, "completion.", violations)
    one = isinstance(message, pb.CompleteRequest) or base.sampling.n == 1
    violations.check(one, "sampling.n", "a session makes one suggestion at a time; use Complete for more")
    return CompletionOptions(
        base=base,
        mode=_MODES.get(made.mode, FillMode.MIDDLE),
        max_prompt_tokens=tokens,
        ttft_ms=ttft_ms,
        dedent=made.stop_at_dedent if made.HasField("stop_at_dedent") else True,
        bracket=made.stop_at_bracket if made.HasField("stop_at_bracket") else True,
        suffix=made.stop_at_suffix if made.HasField("stop_at_suffix") else True,
    )


def _read_greedy(
    message: pb.CompleteRequest | pb.SessionSetup | pb.PredictEditRequest, violations: ViolationCollector
) -> Request:
    """As `read_base`, but greedy by default."""
    base = read_base(message, violations)
    if message.sampling.HasField("temperature"):
        return base
    return replace(base, sampling=replace(base.sampling, temperature=0.0))


def read_limits(
    message: pb.CompletionOptions | pb.PredictEditRequest, path: str, violations: ViolationCollector
) -> tuple[int | None, float | None]:
    """Return the most tokens of the prompt, and the objective of time to first token in milliseconds; None: it has
    none. path: of the message."""
    tokens = message.max_prompt_tokens if message.HasField("max_prompt_tokens") else None
    enough = tokens is None or tokens >= SMALLEST_BUDGET
    violations.check(enough, f"{path}max_prompt_tokens", f"must be at least {SMALLEST_BUDGET}")
    ttft_ms = message.ttft_ms if message.HasField("ttft_ms") else None
    good = ttft_ms is None or 0 < ttft_ms < math.inf
    violations.check(good, f"{path}ttft_ms", "must be a positive number of milliseconds; leave it out for no objective")
    return tokens, ttft_ms


def read_place(message: pb.PredictEditRequest, violations: ViolationCollector) -> EditPlace:
    """Return the place at which edits are to be predicted; adds to ``violations`` what is wrong with it."""
    newest = message.recent[-RECENT_EDITS:]
    return EditPlace.at(
        message.text,
        message.cursor,
        read_unit(message, violations, "unit"),
        violations,
        path=message.path,
        recent=tuple(RecentEdit.of(each.path, each.before, each.after, each.diff) for each in newest),
        n_older=len(message.recent) - len(newest),
        files=read_files(message.extra),
        diagnostics=tuple((each.line, each.message) for each in message.diagnostics),
    )


def read_edit_request(message: pb.PredictEditRequest, violations: ViolationCollector) -> Request:
    """Return the request of a predicted edit, still without a prompt; adds to ``violations`` what is wrong with it."""
    base = _read_greedy(message, violations)
    violations.check(base.sampling.n == 1, "sampling.n", "must be 1")
    return replace(base, request_id=message.request_id or uuid.uuid4().hex)


def edit_messages(event: RequestEvent, reader: EditReader, model: str) -> Iterator[pb.PredictEditResponse]:
    """The messages to the caller for ``event`` of a predicted edit's request."""
    for edit in reader.take(event):
        yield pb.PredictEditResponse(edit=pb.TextEdit(start=edit.start, end=edit.end, text=edit.text))
    if not isinstance(event, Delta):
        yield event_message(pb.PredictEditResponse, event, model)


def read_unit(
    message: pb.SessionSetup | pb.PredictEditRequest, violations: ViolationCollector, field: str = "setup.unit"
) -> OffsetUnit:
    violations.check(message.unit in _UNITS, field, f"unknown value {message.unit}")
    return _UNITS.get(message.unit, OffsetUnit.CODE_POINT)


def read_outcome(message: pb.ReportOutcomeRequest) -> Outcome:
    """The reported outcome.

    Raises:
        InvalidRequestError: fields are missing or invalid; each one is listed.
    """
    violations = ViolationCollector()
    violations.check(bool(message.suggestion_id), "suggestion_id", "must not be empty")
    known = message.outcome in _OUTCOMES
    violations.check(known, "outcome", f"one of {', '.join(pb.Outcome.keys()[1:])} is needed")
    violations.raise_if_any()
    return _OUTCOMES[message.outcome]


def suggestion_started(ask_id: int, suggestion: Suggestion) -> pb.CompleteSessionResponse:
    origin = pb.SuggestionStarted.ORIGIN_CONTINUED if suggestion.continued else pb.SuggestionStarted.ORIGIN_NEW
    started = pb.SuggestionStarted(
        ask_id=ask_id, suggestion_id=suggestion.suggestion_id, origin=origin, typed_characters=suggestion.typed
    )
    return pb.CompleteSessionResponse(started=started)


def suggestion_finished(ask_id: int, suggestion: Suggestion) -> pb.CompleteSessionResponse:
    assert suggestion.reason is not None  # the suggestion has ended
    found = {} if suggestion.finished is None else figures(suggestion.finished)
    finished = pb.SuggestionFinished(ask_id=ask_id, finish_reason=REASONS[suggestion.reason], **found)
    return pb.CompleteSessionResponse(finished=finished)


def suggestion_dropped(ask_id: int, reason: result.FinishReason.ValueType) -> pb.CompleteSessionResponse:
    return pb.CompleteSessionResponse(finished=pb.SuggestionFinished(ask_id=ask_id, finish_reason=reason))


def ask_refused(ask_id: int, error: RequestError) -> pb.CompleteSessionResponse:
    """Return the refusal of one request of a session, with the content of a call's status."""
    status = rich_status(error)
    message = pb.AskRefused(ask_id=ask_id, code=status.code, reason=error.reason, message=status.message)
    if error.retry_after_s is not None:
        message.retry_after_ms = error.retry_after_s * 1e3
    if isinstance(error, InvalidRequestError):
        message.problems.extend(pb.FieldProblem(field=v.field, description=v.description) for v in error.violations)
    return pb.CompleteSessionResponse(refused=message)
