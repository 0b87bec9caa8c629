"""What a dialect serves at one method and path."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from server.http.call import Call
from server.http.refusal import Refusal


class ErrorStyle(Protocol):
    """How a dialect words a refusal."""

    def body(self, refusal: Refusal) -> Any:
        """The JSON body of an answer that refuses."""

    def event(self, refusal: Refusal) -> bytes:
        """The end of a stream that breaks off after its first byte."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``answer`` answers a call, or raises a `RequestError`, which ``errors`` words. ``operation`` is for OpenAPI.

    Several dialects may share a method and path: the first whose ``claims`` says yes to the body's object answers; one
    without ``claims`` takes whatever comes.
    """

    method: str
    path: str
    answer: Callable[[Call], Coroutine[Any, Any, None]]
    errors: ErrorStyle
    operation: Mapping[str, Any]
    claims: Callable[[Mapping[str, Any]], bool] | None = None
