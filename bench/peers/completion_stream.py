"""Reads a streamed answer of an OpenAI endpoint, and when its text came."""

from __future__ import annotations

import json

from bench.peers.answer import Answer
from bench.peers.peer_error import PeerError

_DATA = "data:"
_SHOWN = 300


class CompletionStream:
    """Give every line to `feed`, with the time; make one per answer. Times are seconds of any one clock."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = self._last_s = sent_s
        self._first_s: float | None = None
        self._texts: list[str] = []
        self._tokens: int | None = None

    def feed(self, line: str, now_s: float) -> None:
        """Take one line of the stream.

        Raises:
            PeerError: it tells of an error, or is not what such a stream holds.
        """
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise PeerError(str(event["error"])[:_SHOWN])
            text = "".join(choice.get("text") or "" for choice in event.get("choices") or [])
            usage = event.get("usage")
            tokens = None if usage is None else int(usage["completion_tokens"])
        except (ValueError, AttributeError, KeyError, TypeError):
            raise PeerError(f"the stream holds something else than completions: {data[:_SHOWN]}") from None
        self._last_s = now_s
        if text:
            self._texts.append(text)
            if self._first_s is None:
                self._first_s = now_s
        if tokens is not None:
            self._tokens = tokens

    def answer(self) -> Answer:
        """All of it, once the stream has ended; an answer without text has its first at its end.

        Raises:
            PeerError: it did not say how many tokens there are.
        """
        if self._tokens is None:
            raise PeerError("the stream ended without its usage")
        first_s = self._last_s if self._first_s is None else self._first_s
        ttft_ms, e2e_ms = (first_s - self._sent_s) * 1e3, (self._last_s - self._sent_s) * 1e3
        return Answer(self._tokens, ttft_ms, e2e_ms, "".join(self._texts))
