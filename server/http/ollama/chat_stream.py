"""A streamed answer of /api/chat."""

from __future__ import annotations

from collections.abc import Sequence

from server.http.ollama.chat_ask import ChatAsk
from server.http.ollama.frame import Frame
from server.http.ollama.message_parts import message
from server.http.ollama.ndjson import MEDIA_TYPE, ndjson
from server.http.openai.tool_call import ToolCall
from server.http.openai.tool_call_parser import ToolCallParser
from server.http.totals import Totals
from specdec.types import Delta, Finished, RequestEvent


class ChatStream:
    """A line per Delta with text in it or with calls, and a last one with the figures."""

    media_type = MEDIA_TYPE

    def __init__(self, ask: ChatAsk) -> None:
        self._frame, self._totals = Frame(ask.model), Totals()
        self._parser = ToolCallParser() if ask.tools else None
        self._calls = 0

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The lines that ``event`` makes."""
        self._totals.add(event)
        if isinstance(event, Delta):
            return self._line([event.text] if self._parser is None else self._parser.push(event.text))
        if isinstance(event, Finished):
            rest = b"" if self._parser is None else self._line(self._parser.flush())
            return rest + ndjson(self._frame.end({"message": message([])}, self._totals, event))
        return b""

    def last(self) -> bytes:
        """Nothing more."""
        return b""

    def _line(self, parts: Sequence[str | ToolCall]) -> bytes:
        if not any(parts):
            return b""
        found = message(parts, self._calls)
        self._calls += len(found.get("tool_calls", ()))
        return ndjson(self._frame.part({"message": found}))
