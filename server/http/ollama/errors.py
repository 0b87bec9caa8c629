"""Refusals in Ollama's words."""

from __future__ import annotations

from server.http.ollama.ndjson import ndjson
from server.http.refusal import Refusal
from server.request_errors import UnknownModelError


class OllamaErrors:
    """``{"error": message}``."""

    def body(self, refusal: Refusal) -> dict[str, str]:
        """The body of an answer that refuses."""
        # Clients look for these words to tell a missing model from a path that is not there.
        prefix = "model not found: " if refusal.reason == UnknownModelError.reason else ""
        return {"error": prefix + refusal.message}

    def event(self, refusal: Refusal) -> bytes:
        """A line with the same object, in the place of the one that says done."""
        return ndjson(self.body(refusal))
