"""Refusals in llama.cpp's words."""

from __future__ import annotations

from typing import Any

from server.http.refusal import Refusal
from server.http.sse import sse

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip


class LlamaErrors:
    """``code`` is the status; ``reason`` and ``field`` are ours."""

    def body(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that refuses."""
        kind = _TYPES.get(refusal.status, "invalid_request_error")
        error: dict[str, Any] = {"code": refusal.status, "message": refusal.message, "type": kind}
        return {"error": error | {"reason": refusal.reason.lower(), "field": refusal.field}}

    def event(self, refusal: Refusal) -> bytes:
        """An event with the same body."""
        return sse(self.body(refusal))
