"""Refusals of the serving side, and every refusal as a tuple that crosses the process boundary and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.errors import (
    DuplicateRequestError,
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)


class DrainingError(RequestError):
    """The server is shutting down and takes no new request."""

    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the request to another, or retry once it is back")


class UnknownModelError(RequestError):
    """The request names a model that is not the one served."""

    reason = "MODEL_NOT_FOUND"

    def __init__(self, asked: str, served: str) -> None:
        self.asked, self.served = asked, served
        super().__init__(f"model {asked!r} is not served here; this server runs {served!r}")


class ChatNotSupportedError(RequestError):
    """The model has no usable chat template."""

    reason = "CHAT_NOT_SUPPORTED"


class DeadlinePassedError(RequestError):
    """The request's deadline passed before it was complete."""

    reason = "DEADLINE_EXCEEDED"

    def __init__(self) -> None:
        super().__init__("the deadline passed before the request was complete")


class GenerationFailedError(RequestError):
    """The engine ended a request with an error of its own; ``reason`` says which."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def pack_error(error: RequestError) -> tuple[str, str, list[Any]]:
    """``error`` as (reason, message, details)."""
    details: list[Any] = []
    if isinstance(error, InvalidRequestError):
        details = [(v.field, v.description) for v in error.violations]
    elif isinstance(error, PromptTooLongError):
        details = [error.limit, error.got]
    elif isinstance(error, QueueFullError):
        details = [error.limit, error.retry_after_s]
    return (error.reason, str(error), details)


def unpack_error(parts: Sequence[Any]) -> RequestError:
    """The error `pack_error` was given; one of a reason unknown here becomes `GenerationFailedError`."""
    reason, message, details = parts
    if reason == InvalidRequestError.reason:
        return InvalidRequestError([FieldViolation(name, text) for name, text in details])
    if reason == PromptTooLongError.reason:
        return PromptTooLongError(*details)
    if reason == QueueFullError.reason:
        return QueueFullError(*details)
    if reason == DuplicateRequestError.reason:
        return DuplicateRequestError(message)
    if reason == EngineDeadError.reason:
        return EngineDeadError(message)
    return GenerationFailedError(reason, message)
