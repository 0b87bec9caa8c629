"""Errors of the serving side, and the wire form of errors between the processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec.errors import (
    MAX_ENGINES_STOPPED,
    UNAVAILABLE_RETRY_S,
    DuplicateRequestError,
    EngineDeadError,
    FieldViolation,
    FingerprintMismatchError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)


class DrainingError(RequestError):
    """The server is shutting down and takes no new request."""

    reason = "DRAINING"
    http_status, grpc_code, retry_after_s = 503, "UNAVAILABLE", UNAVAILABLE_RETRY_S
    message = "the server is shutting down; send the request to another, or retry once it is back"


class UnknownModelError(RequestError):
    """The request names a model that is not served."""

    reason = "MODEL_NOT_FOUND"
    http_status, grpc_code, field = 404, "NOT_FOUND", "model"

    def __init__(self, asked: str, *served: str) -> None:
        self.asked = asked
        super().__init__(
            f"model {asked!r} is not served here; this server runs {', '.join(map(repr, served))}; ask for that, or "
            "start the server with `--alias NAME` to serve it by another name too"
        )


class PoisonRequestError(RequestError):
    """The engine died twice while this request was in flight, the second time with no other."""

    reason = "STOPPED_ENGINE_TWICE"
    http_status, grpc_code, engines_stopped = 503, "UNAVAILABLE", MAX_ENGINES_STOPPED
    message = "this request stopped the engine twice and is refused; change it, and report it with the log"


class ChatNotSupportedError(RequestError):
    """The model has no usable chat template."""

    reason = "CHAT_NOT_SUPPORTED"
    http_status, grpc_code, field = 422, "FAILED_PRECONDITION", "messages"


class DeadlinePassedError(RequestError):
    """The request's deadline passed before it was complete."""

    reason = "DEADLINE_EXCEEDED"
    http_status, grpc_code = 408, "DEADLINE_EXCEEDED"

    def __init__(self, retry_after_s: float | None = None) -> None:
        """retry_after_s: for a request that was never started, when one like it may start."""
        self.retry_after_s = retry_after_s
        super().__init__("the deadline passed before the request was complete")


# Reasons that the engine reports but the request causes, and the field at fault.
_OWN_DOING = {"GRAMMAR_TOO_COMPLEX": "grammar", "NO_TOKEN_LEFT": "allowed_token_ids"}


class GenerationFailedError(RequestError):
    """The engine ended a request with the error ``reason``."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        if reason in _OWN_DOING:
            self.http_status, self.grpc_code, self.field = 400, "INVALID_ARGUMENT", _OWN_DOING[reason]
        super().__init__(message)


def pack_error(error: RequestError) -> tuple[str, str, list[Any]]:
    """``error`` as (reason, message, details)."""
    return error.reason, str(error), list(error.details)


def unpack_error(parts: Sequence[Any]) -> RequestError:
    """The inverse of `pack_error`; an unknown reason becomes `GenerationFailedError`."""
    reason, message, details = parts
    kind = _FROM_ENGINE.get(reason)
    if kind is None:
        return GenerationFailedError(reason, message)
    if kind is InvalidRequestError:
        return InvalidRequestError([FieldViolation(name, text) for name, text in details])
    return kind(*(details or [message]))


class DraftNotSwappedError(RequestError):
    """The draft model could not be replaced; the former one is still in use."""

    reason = "DRAFT_NOT_SWAPPED"
    http_status, grpc_code = 409, "FAILED_PRECONDITION"


class SwapUnderWayError(RequestError):
    """Another draft model is being loaded."""

    reason = "SWAP_UNDER_WAY"
    http_status, grpc_code, retry_after_s = 503, "UNAVAILABLE", UNAVAILABLE_RETRY_S
    message = "another draft model is being loaded; retry once it is loaded"


# Errors that are rebuilt from their details or, where they have none, from their message.
_FROM_ENGINE: dict[str, type[RequestError]] = {
    kind.reason: kind
    for kind in (
        InvalidRequestError, PromptTooLongError, QueueFullError, DuplicateRequestError, EngineDeadError,
        FingerprintMismatchError, DraftNotSwappedError, SwapUnderWayError,
    )
}  # fmt: skip


class UnauthenticatedError(RequestError):
    """The call carries no key or an unknown one."""

    reason = "UNAUTHENTICATED"
    http_status, grpc_code = 401, "UNAUTHENTICATED"


class PermissionDeniedError(RequestError):
    """The caller's key does not permit the call."""

    reason = "PERMISSION_DENIED"
    http_status, grpc_code = 403, "PERMISSION_DENIED"


class HostNotAllowedError(RequestError):
    """The call's Host header names another server."""

    reason = "HOST_NOT_ALLOWED"
    http_status, grpc_code = 403, "PERMISSION_DENIED"


class CrossSiteError(RequestError):
    """A page of another origin sent a call without a CORS preflight."""

    reason = "CROSS_SITE"
    http_status, grpc_code = 403, "PERMISSION_DENIED"


MIN_RETRY_S = 0.1  # least retry_after_s of a refusal


class RateLimitedError(RequestError):
    """The key has used up the limit in the field ``limit``, whose value is ``value``."""

    reason = "RATE_LIMITED"
    http_status, grpc_code = 429, "RESOURCE_EXHAUSTED"

    def __init__(self, key: str, limit: str, value: float, retry_after_s: float) -> None:
        self.key, self.limit, self.value = key, limit, value
        self.retry_after_s = max(MIN_RETRY_S, retry_after_s)
        super().__init__(f"key {key!r} allows {limit} {value:g}; retry in {self.retry_after_s:.1f} s")


class TokenQueueFullError(QueueFullError):
    """Too many prompt tokens wait."""

    def __init__(self, limit: int, waiting: int, retry_after_s: float) -> None:
        super().__init__(limit, max(MIN_RETRY_S, retry_after_s))
        self.args = (
            f"queue is full: {waiting} prompt tokens wait and at most {limit} may; retry in {self.retry_after_s:.1f} s",
        )


class LateError(RequestError):
    """The request is not expected to meet its deadline. Times are seconds from now."""

    reason = "DEADLINE_UNATTAINABLE"
    http_status, grpc_code = 429, "RESOURCE_EXHAUSTED"

    def __init__(self, needed_s: float, deadline_s: float, retry_after_s: float) -> None:
        self.needed_s, self.deadline_s = needed_s, deadline_s
        self.retry_after_s = max(MIN_RETRY_S, retry_after_s)
        super().__init__(
            f"done in about {needed_s:.1f} s at the present rate, but the deadline is in {deadline_s:.1f} s; retry in "
            f"{self.retry_after_s:.1f} s, allow more time or ask for fewer tokens"
        )


class SlowReaderError(RequestError):
    """Unread events exceed their memory, and this stream has the most of them."""

    reason = "READER_TOO_SLOW"
    http_status, grpc_code = 429, "RESOURCE_EXHAUSTED"
    message = "the answer was not read as fast as it was generated; read faster, or ask for less at once"


class BodiesFullError(RequestError):
    """The bodies of calls in flight take all the memory that they may, or this one arrived too slowly meanwhile."""

    reason = "BODIES_FULL"
    http_status, grpc_code = 429, "RESOURCE_EXHAUSTED"

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"the server has no memory for more request bodies; retry in {retry_after_s:.0f} s")


class SupersededError(RequestError):
    """A newer request of the same tenant with the same ``supersedes_key`` replaced this one."""

    reason = "SUPERSEDED"
    http_status, grpc_code = 409, "ABORTED"
    message = "a newer request with the same supersedes_key took this one's place"


WATCHED_FILES = KEYS_FILE, TLS_FILES, CAPTURE_FILE, RECORDS_FILE = "keys", "tls", "capture", "experiment"
FileErrors = Counter[str]
"""Failed reads and writes of the server's own files, by the kinds in `WATCHED_FILES`."""
