"""Any refusal as HTTP has it: status, reason, fields at fault and headers, before a dialect words it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from server.errors import (
    ChatNotSupportedError,
    DeadlinePassedError,
    DrainingError,
    KeyChecksBusyError,
    LateError,
    PermissionDeniedError,
    RateLimitedError,
    SupersededError,
    UnauthenticatedError,
    UnknownModelError,
)
from server.experiment.live.folder import (
    ExperimentNotFoundError,
    ExperimentNotStartedError,
    ExperimentsOffError,
    NoResultError,
)
from server.fim import FimNotSupportedError
from server.observe.records import note_refusal
from specdec.errors import (
    DuplicateRequestError,
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)


class BodyTooLargeError(RequestError):
    """The body exceeds what the server takes."""

    reason = "BODY_TOO_LARGE"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body exceeds {limit} bytes; shorten it, or raise server.max_message_bytes")


class BodyTimeoutError(RequestError):
    """The rest of the body did not come."""

    reason = "BODY_TIMEOUT"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no more of the body came within {seconds:g} s; send it again")


class PathNotFoundError(RequestError):
    """There is nothing at this path."""

    reason = "PATH_NOT_FOUND"

    def __init__(self, path: str) -> None:
        super().__init__(f"nothing is served at {path[:200]!r}; GET /openapi.json lists what is")


class MethodNotAllowedError(RequestError):
    """The path takes other methods."""

    reason = "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method[:20]} is not served here; use {allowed}")


class ClientGoneError(Exception):
    """The client closed the connection: nobody is left to be told anything."""


_LOG = logging.getLogger(__name__)
UNAVAILABLE_RETRY_S = 1.0
_MESSAGE_CHARACTERS = 2000
_MAX_VIOLATIONS = 32
_PREFIXES = ("sampling.", "stopping.", "output.")

_STATUS: dict[str, int] = {
    InvalidRequestError.reason: 400,
    PromptTooLongError.reason: 400,
    # Found out by the engine on the way, but the request's own doing.
    "GRAMMAR_TOO_COMPLEX": 400,
    "NO_TOKEN_LEFT": 400,
    UnauthenticatedError.reason: 401,
    PermissionDeniedError.reason: 403,
    UnknownModelError.reason: 404,
    PathNotFoundError.reason: 404,
    ExperimentNotFoundError.reason: 404,
    MethodNotAllowedError.reason: 405,
    BodyTimeoutError.reason: 408,
    DeadlinePassedError.reason: 408,
    DuplicateRequestError.reason: 409,
    SupersededError.reason: 409,
    ExperimentNotStartedError.reason: 409,
    NoResultError.reason: 409,
    BodyTooLargeError.reason: 413,
    QueueFullError.reason: 429,
    RateLimitedError.reason: 429,
    LateError.reason: 429,
    KeyChecksBusyError.reason: 429,
    ChatNotSupportedError.reason: 501,
    FimNotSupportedError.reason: 501,
    ExperimentsOffError.reason: 501,
    EngineDeadError.reason: 503,
    DrainingError.reason: 503,
}
# The field that is at fault where the error itself does not say.
_FIELDS = {
    PromptTooLongError.reason: "prompt",
    UnknownModelError.reason: "model",
    ChatNotSupportedError.reason: "messages",
    FimNotSupportedError.reason: "suffix",
    DuplicateRequestError.reason: "x-request-id",
    "GRAMMAR_TOO_COMPLEX": "grammar",
    "NO_TOKEN_LEFT": "allowed_token_ids",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """``reason`` is the machine-readable cause, ``field`` the first field at fault, ``violations`` all of them."""

    status: int
    reason: str
    message: str
    field: str | None = None
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


def refusal_of(error: Exception, names: Mapping[str, str]) -> Refusal:
    """``error`` as HTTP has it; an error that is no `RequestError` is logged and told as internal.

    ``names``: fields of the engine's request by their names in the body.
    """
    note_refusal(error)
    if not isinstance(error, RequestError):
        _LOG.error("an HTTP call broke", exc_info=error)
        return Refusal(500, "INTERNAL", "internal error; the server's log tells more")
    status = _STATUS.get(error.reason, 500)
    if status == 500:
        _LOG.error("request failed: %s: %s", error.reason, error)
    retry_s = getattr(error, "retry_after_s", UNAVAILABLE_RETRY_S if status == 503 else None)
    headers = [] if retry_s is None else _retry_headers(retry_s)
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, DrainingError | BodyTooLargeError | BodyTimeoutError):
        headers.append((b"connection", b"close"))
    found: tuple[FieldViolation, ...] = ()
    message, name = str(error), _FIELDS.get(error.reason)
    if isinstance(error, InvalidRequestError):
        named: dict[str, FieldViolation] = {}
        for violation in error.violations:
            path = body_field(violation.field, names)
            named.setdefault(path, FieldViolation(path, violation.description))
        found = tuple(named.values())[:_MAX_VIOLATIONS]
        message, name = "; ".join(f"{v.field}: {v.description}" for v in found), found[0].field
    elif name is not None:
        name = body_field(name, names)
    return Refusal(status, error.reason, _cut(message), name, found, retry_s, tuple(headers))


def body_field(name: str, names: Mapping[str, str]) -> str:
    """What the engine's field ``name`` is called in the body."""
    if name in names:
        return names[name]
    prefix = next((p for p in _PREFIXES if name.startswith(p)), "")
    return name.removeprefix(prefix)


def _retry_headers(seconds: float) -> list[tuple[bytes, bytes]]:
    whole, milliseconds = max(1, math.ceil(seconds)), max(1, round(seconds * 1e3))
    return [(b"retry-after", b"%d" % whole), (b"retry-after-ms", b"%d" % milliseconds)]


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "..."
