"""Refusals that only HTTP knows."""

from __future__ import annotations

from specdec.errors import RequestError


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
