"""The chunks of a streamed answer: what is the same in all of them, and how they end."""

from __future__ import annotations

from typing import Any

from server.http.openai.figures import extras, usage, usage_so_far
from server.http.openai.stream_options import StreamOptions
from server.http.sse import DONE, sse
from server.http.totals import Totals


class Chunks:
    """``head``: id, object, created, model. ``samples``: how many will finish."""

    def __init__(self, head: dict[str, Any], options: StreamOptions, samples: int) -> None:
        self._head, self._options, self._samples = head, options, samples
        self.totals = Totals()

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """One chunk with one choice."""
        chunk = {**self._head, "choices": [choice], **more}
        if self._options.include_usage:
            chunk["usage"] = usage_so_far(self.totals) if self._options.continuous else None
        return sse(chunk)

    def finish(self, choice: dict[str, Any]) -> bytes:
        """The chunk that ends a sample, which `totals` counts already. The last one has the figures, unless a chunk of
        their own was asked for: readers take ``choices[0]`` of any other."""
        if self.totals.finished < self._samples or self._options.include_usage:
            return self.chunk(choice)
        return self.chunk(choice, **extras(self.totals))

    def ending(self) -> bytes:
        """What follows the last sample's end."""
        if not self._options.include_usage:
            return DONE
        return sse({**self._head, "choices": [], "usage": usage(self.totals), **extras(self.totals)}) + DONE
