"""Errors as gRPC statuses with google.rpc details."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from server.errors import LateError, RateLimitedError, UnknownModelError
from server.observe.records import (
    NO_RETRY_HEADER,
    REQUEST_ID_HEADER,
    current_call,
    engines_stopped,
    forbids_retry,
    note_refusal,
)
from specdec.errors import InvalidRequestError, PromptTooLongError, QueueFullError, RequestError

DOMAIN = "specdec"
# Clients accept 8 KiB of trailers by default, which carry the details.
_MESSAGE_BYTES = 1000
_DESCRIPTION_BYTES = 160
_PLAN_BYTES = 400  # of a problem of an experiment's plan, which names a line, a field and what the field may hold
_VIOLATIONS_BYTES = 3000  # of all fields and descriptions; violations beyond these are left out

Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: Context, error: Exception) -> None:
    """End the call with the status of ``error``, which is INTERNAL for any but a `RequestError`; raises, as
    `context.abort` does. Called outside of ``except`` blocks.

    gRPC keeps what `context.abort` raises. So ``error`` loses its frames: a message in them would stay in memory until
    the next full garbage collection.
    """
    note_refusal(error)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if not isinstance(error, RequestError):
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")
    status, call = rich_status(error), current_call()
    trailers: list[tuple[str, str | bytes]] = [] if call is None else [(REQUEST_ID_HEADER, call.request_id)]
    trailers += [("grpc-status-details-bin", status.SerializeToString())]
    if forbids_retry(error):
        trailers.append((NO_RETRY_HEADER, "true"))
    if error.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1e3))))
    await context.abort(grpc.StatusCode[error.grpc_code], status.message, tuple(trailers))


def rich_status(error: RequestError) -> Status:
    """Return the google.rpc.Status of ``error`` with its details."""
    details: list[Message] = []
    metadata: dict[str, str] = {}
    if isinstance(error, InvalidRequestError):
        details.append(BadRequest(field_violations=_violations(error)))
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
    if stopped := engines_stopped(error):
        metadata["engines_stopped"] = str(stopped)
    details.append(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.retry_after_s is not None:
        details.append(RetryInfo(retry_delay=timedelta(seconds=error.retry_after_s)))
    status = Status(code=grpc.StatusCode[error.grpc_code].value[0], message=_cut(str(error), _MESSAGE_BYTES))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _violations(error: InvalidRequestError) -> list[BadRequest.FieldViolation]:
    found, room = [], _VIOLATIONS_BYTES
    for violation in error.violations:
        longest = _PLAN_BYTES if violation.field == "plan" else _DESCRIPTION_BYTES
        field, description = _cut(violation.field, _DESCRIPTION_BYTES), _cut(violation.description, longest)
        room -= len(field.encode()) + len(description.encode())
        if room < 0:
            break
        found.append(BadRequest.FieldViolation(field=field, description=description))
    return found


def _cut(text: str, limit: int) -> str:
    """Return ``text``, cut to ``limit`` bytes of UTF-8 and three dots."""
    data = text.encode()
    return text if len(data) <= limit else data[:limit].decode(errors="ignore") + "..."
