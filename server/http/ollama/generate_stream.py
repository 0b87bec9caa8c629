"""A streamed answer of /api/generate."""

from __future__ import annotations

from server.http.ollama.frame import Frame
from server.http.ollama.generate_ask import GenerateAsk
from server.http.ollama.ndjson import MEDIA_TYPE, ndjson
from server.http.totals import Totals
from specdec.types import Delta, Finished, Request, RequestEvent


class GenerateStream:
    """A line per Delta with text in it, and a last one with the figures."""

    media_type = MEDIA_TYPE

    def __init__(self, ask: GenerateAsk, request: Request) -> None:
        self._frame, self._totals = Frame(ask.model), Totals()
        self._context = list(request.prompt_ids) if ask.context else None

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The line that ``event`` makes."""
        self._totals.add(event)
        if isinstance(event, Delta):
            if self._context is not None:
                self._context += event.token_ids
            return ndjson(self._frame.part({"response": event.text})) if event.text else b""
        if isinstance(event, Finished):
            content = {"response": ""} | ({} if self._context is None else {"context": self._context})
            return ndjson(self._frame.end(content, self._totals, event))
        return b""

    def last(self) -> bytes:
        """Nothing more."""
        return b""
