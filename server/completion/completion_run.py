"""An admitted request of code completion: its events, and the time that its prompt took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from server.request_stream import RequestStream
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent, Started


class CompletionRun:
    """A request's events, and the time of its prompt. Whoever starts it closes it."""

    def __init__(self, source: RequestStream, on_computed: Callable[[int, float], None]) -> None:
        """on_computed: called once the prompt is computed, however slow the reader is, with the tokens that the prefix
        cache had of it, and the milliseconds from its first step to its first token, infinite if none is asked for."""
        self.events = source  # iterating raises a RequestError where the request is refused or fails
        self._begun_s = time.monotonic()  # submitted; once that is known, its first step
        self._cached_tokens = 0
        self._on_computed = on_computed
        source.watcher = self._saw

    def close(self) -> None:
        """Stop reading, which ends the request."""
        self.events.close()

    def _saw(self, event: RequestEvent) -> None:
        if isinstance(event, Started):
            self._cached_tokens = event.cached_tokens
            self._begun_s += event.queue_ms / 1e3  # the wait for a place, or for another's prompt, is not its time
            return
        self.events.watcher = None
        if isinstance(event, Delta):
            self._on_computed(self._cached_tokens, (time.monotonic() - self._begun_s) * 1e3)
        elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
            self._on_computed(self._cached_tokens, math.inf)
