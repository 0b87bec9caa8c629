"""A streamed answer of /v1/fim/completions."""

from __future__ import annotations

from typing import Any

from server.http.mistral.words import finish_reason
from server.http.openai.chunks import Chunks
from server.http.openai.completion_ask import CompletionAsk
from server.http.sse import MEDIA_TYPE
from specdec.types import Delta, Finished, RequestEvent


class FimStream:
    """One chunk per Delta with text in it, one per sample's end; each has a choice with a ``delta.content``, which
    Continue takes for granted."""

    media_type = MEDIA_TYPE

    def __init__(self, head: dict[str, Any], ask: CompletionAsk) -> None:
        self._chunks = Chunks(head, ask.streaming, ask.requests[0].sampling.n)

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The chunk that ``event`` makes, if it does."""
        self._chunks.totals.add(event)
        if isinstance(event, Delta) and event.text:
            return self._chunks.chunk(_choice(event.index, event.text, None))
        if isinstance(event, Finished):
            return self._chunks.finish(_choice(event.index, "", finish_reason(event)))
        return b""

    def last(self) -> bytes:
        """What follows the last sample's end."""
        return self._chunks.ending()


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
