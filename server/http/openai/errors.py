"""Refusals in OpenAI's words."""

from __future__ import annotations

from typing import Any

from server.http.refusal import Refusal
from server.http.sse import sse

_TYPES = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error",
    501: "not_supported_error", 503: "server_error",
}  # fmt: skip


class OpenAIErrors:
    """``param`` is the first field at fault, and ``errors`` lists all."""

    def body(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that refuses."""
        error: dict[str, Any] = {
            "message": refusal.message,
            "type": _TYPES.get(refusal.status, "invalid_request_error"),
            "param": refusal.field,
            "code": refusal.reason.lower(),
        }
        if refusal.violations:
            error["errors"] = [{"param": v.field, "message": v.description} for v in refusal.violations]
        return {"error": error}

    def event(self, refusal: Refusal) -> bytes:
        """An event with the same body, and no [DONE] after it: the answer is not complete."""
        return sse(self.body(refusal))
