"""Errors as HTTP refusals: status, reason, fields and headers, which a dialect then words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from server.errors import DrainingError, FingerprintMismatchError, SupersededError
from server.observe.records import NO_RETRY_HEADER, forbids_retry, note_refusal
from specdec.errors import FieldViolation, InvalidRequestError, PromptTooLongError, RequestError


class CallRefusedError(RequestError):
    """A refusal that only the HTTP port makes. Its status and reason are those of the place that raises it."""

    def __init__(self, status: int, reason: str, message: str, field: str | None = None) -> None:
        self.http_status, self.reason, self.field = status, reason, field
        super().__init__(message)


def path_not_found(path: str, likely: str | None = None) -> CallRefusedError:
    """No endpoint has ``path``. likely: a path that is served."""
    hint = "GET /openapi.json lists the endpoints" if likely is None else f"did you mean {likely}?"
    return CallRefusedError(404, "PATH_NOT_FOUND", f"nothing is served at {path[:200]!r}; {hint}")


class ClientGoneError(Exception):
    """The client closed the connection before it was answered."""


_MESSAGE_CHARACTERS = 2000
_MAX_VIOLATIONS = 32
_CLOSING = (DrainingError.reason, "BODY_TOO_LARGE", "BODY_TIMEOUT")  # the connection serves no other call
LLAMA_TOO_LONG = "the request exceeds the available context size: {message}"
"""A prompt that is too long, as llama.cpp and Ollama word it, for `Refusal.worded`."""
_PREFIXES = ("sampling.", "stopping.", "output.")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that refuses a call."""

    status: int
    reason: str  # machine-readable
    message: str
    field: str | None = None  # the first wrong one
    violations: tuple[FieldViolation, ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    too_long: tuple[int, int] | None = None  # the limit of prompt tokens, and the prompt's number of them

    def worded(self, too_long: str) -> str:
        """The message; for a prompt that is too long, ``too_long`` filled in: clients search for their dialect's words,
        and shorten the prompt when they find them."""
        if self.too_long is None:
            return self.message
        limit, got = self.too_long
        return too_long.format(limit=limit, got=got, message=self.message)


def refusal_of(error: Exception, names: Mapping[str, str]) -> Refusal:
    """``error`` as a refusal; any but a `RequestError` as an internal error.

    names: the body's field names by the engine's.
    """
    note_refusal(error)
    if not isinstance(error, RequestError):
        return Refusal(500, "INTERNAL", "internal error; see the server's log")
    status, retry_s = error.http_status, error.retry_after_s
    headers: list[tuple[bytes, bytes]] = []
    if retry_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, round(retry_s * 1e3))))
    final = forbids_retry(error)
    if final:
        headers.append((NO_RETRY_HEADER.encode(), b"true"))
    if final or isinstance(error, SupersededError | FingerprintMismatchError):
        headers.append((b"x-should-retry", b"false"))  # OpenAI's and Anthropic's clients repeat any other 409 and 503
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.reason in _CLOSING:
        headers.append((b"connection", b"close"))
    found: tuple[FieldViolation, ...] = ()
    message, name = str(error), error.field
    if isinstance(error, InvalidRequestError):
        named: dict[str, FieldViolation] = {}
        for violation in error.violations:
            path = body_field(violation.field, names)
            named.setdefault(path, FieldViolation(path, violation.description))
        found = tuple(named.values())[:_MAX_VIOLATIONS]
        message, name = "; ".join(f"{v.field}: {v.description}" for v in found), found[0].field
    elif name is not None:
        name = body_field(name, names)
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "..."
    too_long = (error.limit, error.got) if isinstance(error, PromptTooLongError) else None
    return Refusal(status, error.reason, message, name, found, tuple(headers), too_long)


def body_field(name: str, names: Mapping[str, str]) -> str:
    """The body's name of the engine's field ``name``."""
    if name in names:
        return names[name]
    prefix = next((p for p in _PREFIXES if name.startswith(p)), "")
    return name.removeprefix(prefix)
