"""Refusals as gRPC statuses with google.rpc details, and the one place where a call's exceptions end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from server.errors import (
    ChatNotSupportedError,
    DeadlinePassedError,
    DraftNotSwappedError,
    DrainingError,
    KeyChecksBusyError,
    LateError,
    NotAdministeredError,
    PermissionDeniedError,
    RateLimitedError,
    SupersededError,
    SwapUnderWayError,
    UnauthenticatedError,
    UnknownModelError,
)
from server.experiment.live.folder import (
    ExperimentNotFoundError,
    ExperimentNotStartedError,
    ExperimentsOffError,
    NoResultError,
)
from server.observe.records import current_call, note_refusal
from specdec.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)

_LOG = logging.getLogger(__name__)
DOMAIN = "specdec"
REQUEST_ID = "x-request-id"
UNAVAILABLE_RETRY_S = 1.0
# Clients take 8 KiB of trailers by default, and the details travel in them.
_MESSAGE_BYTES = 1000
_DESCRIPTION_BYTES = 160

_CODES: dict[str, grpc.StatusCode] = {
    InvalidRequestError.reason: grpc.StatusCode.INVALID_ARGUMENT,
    PromptTooLongError.reason: grpc.StatusCode.INVALID_ARGUMENT,
    ChatNotSupportedError.reason: grpc.StatusCode.FAILED_PRECONDITION,
    "FIM_NOT_SUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
    # Found out by the engine on the way, but the request's own doing.
    "GRAMMAR_TOO_COMPLEX": grpc.StatusCode.INVALID_ARGUMENT,
    "NO_TOKEN_LEFT": grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError.reason: grpc.StatusCode.NOT_FOUND,
    DuplicateRequestError.reason: grpc.StatusCode.ALREADY_EXISTS,
    QueueFullError.reason: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RateLimitedError.reason: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LateError.reason: grpc.StatusCode.RESOURCE_EXHAUSTED,
    KeyChecksBusyError.reason: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SupersededError.reason: grpc.StatusCode.ABORTED,
    DeadlinePassedError.reason: grpc.StatusCode.DEADLINE_EXCEEDED,
    EngineDeadError.reason: grpc.StatusCode.UNAVAILABLE,
    DrainingError.reason: grpc.StatusCode.UNAVAILABLE,
    UnauthenticatedError.reason: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError.reason: grpc.StatusCode.PERMISSION_DENIED,
    NotAdministeredError.reason: grpc.StatusCode.UNIMPLEMENTED,
    DraftNotSwappedError.reason: grpc.StatusCode.FAILED_PRECONDITION,
    SwapUnderWayError.reason: grpc.StatusCode.UNAVAILABLE,
    ExperimentsOffError.reason: grpc.StatusCode.UNIMPLEMENTED,
    ExperimentNotFoundError.reason: grpc.StatusCode.NOT_FOUND,
    ExperimentNotStartedError.reason: grpc.StatusCode.FAILED_PRECONDITION,
    NoResultError.reason: grpc.StatusCode.FAILED_PRECONDITION,
}

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def guarded(method: Method) -> Method:
    """Decorates a servicer's coroutine method: a `RequestError` becomes its status, anything else INTERNAL."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(self, request, context)
        except RequestError as error:
            await refuse(context, error)
        except Exception as error:
            note_refusal(error)
            request_id = getattr(request, "request_id", "") or "without an id"
            _LOG.exception("%s: request %s", method.__name__, request_id)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log tells more")

    return call  # type: ignore[return-value]


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> None:
    """End the call with the status of ``error``; raises, as `context.abort` does."""
    note_refusal(error)
    code = status_code(error)
    if code == grpc.StatusCode.INTERNAL:
        _LOG.error("request failed: %s: %s", error.reason, error)
    status = rich_status(code, error)
    call = current_call()
    trailers: list[tuple[str, str | bytes]] = [] if call is None else [(REQUEST_ID, call.request_id)]
    trailers += [("grpc-status-details-bin", status.SerializeToString())]
    retry_s = _retry_after_s(error)
    if retry_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(retry_s * 1e3))))
    await context.abort(code, status.message, tuple(trailers))


def status_code(error: RequestError) -> grpc.StatusCode:
    """The code of ``error``."""
    return _CODES.get(error.reason, grpc.StatusCode.INTERNAL)


def rich_status(code: grpc.StatusCode, error: RequestError) -> Status:
    """The google.rpc.Status of ``error``, its details and all."""
    details: list[Message] = []
    metadata: dict[str, str] = {}
    if isinstance(error, InvalidRequestError):
        details.append(
            BadRequest(
                field_violations=[
                    BadRequest.FieldViolation(field=v.field, description=_cut(v.description, _DESCRIPTION_BYTES))
                    for v in error.violations
                ]
            )
        )
    elif isinstance(error, PromptTooLongError):
        metadata = {"limit": str(error.limit), "got": str(error.got)}
    elif isinstance(error, QueueFullError):
        metadata = {"limit": str(error.limit)}
    elif isinstance(error, RateLimitedError):
        metadata = {"limit": error.limit, "value": f"{error.value:g}"}
        details.append(
            QuotaFailure(violations=[QuotaFailure.Violation(subject=f"key:{error.key}", description=error.limit)])
        )
    elif isinstance(error, LateError):
        metadata = {"needed_s": f"{error.needed_s:.3f}", "deadline_s": f"{error.deadline_s:.3f}"}
    elif isinstance(error, UnknownModelError):
        details.append(ResourceInfo(resource_type="model", resource_name=_cut(error.asked, _DESCRIPTION_BYTES)))
    details.append(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    retry_s = _retry_after_s(error)
    if retry_s is not None:
        details.append(RetryInfo(retry_delay=_duration(retry_s)))
    status = Status(code=code.value[0], message=_cut(str(error), _MESSAGE_BYTES))
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _retry_after_s(error: RequestError) -> float | None:
    told: float | None = getattr(error, "retry_after_s", None)
    if told is not None:
        return told
    if _CODES.get(error.reason) == grpc.StatusCode.UNAVAILABLE:
        return UNAVAILABLE_RETRY_S
    return None


def _duration(seconds: float) -> Duration:
    whole = int(seconds)
    return Duration(seconds=whole, nanos=round((seconds - whole) * 1e9))


def _cut(text: str, limit: int) -> str:
    """``text`` within ``limit`` bytes of UTF-8, give or take the dots."""
    data = text.encode()
    return text if len(data) <= limit else data[:limit].decode(errors="ignore") + "..."
