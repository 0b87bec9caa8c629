"""One generation, and everybody who reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from server.completion.event_source import EventSource
from server.request_errors import GenerationFailedError
from specdec.errors import RequestError
from specdec.types import Delta, Finished, RequestEvent


class SharedRun:
    """Keeps a request's events for readers that come later. Once the last reader has left, the request is ended.

    ``text``: of sample 0, as far as it is certain. ``finished``: the end of sample 0. ``error``: what ended the request
    instead. ``on_change`` is told of the first tokens and of the end. Made with one reader, who must `leave`.
    """

    def __init__(self, source: EventSource, on_change: Callable[[SharedRun], None]) -> None:
        self.events: list[RequestEvent] = []
        self.text = ""
        self.finished: Finished | None = None
        self.error: RequestError | None = None
        self.ended = self.has_tokens = False
        self._source, self._on_change = source, on_change
        self._readers = 1
        self._wake = asyncio.Event()
        self._pump = asyncio.create_task(self._read(), name="completion-run")

    def join(self) -> None:
        """One reader more."""
        self._readers += 1

    def leave(self) -> None:
        """One reader less."""
        self._readers -= 1
        if self._readers == 0 and not self.ended:
            self._source.close()
            self._pump.cancel()
            self._end()

    async def more(self, seen: int) -> None:
        """Wait until there are more than ``seen`` events, or the end."""
        while len(self.events) <= seen and not self.ended:
            await self._wake.wait()

    async def read(self) -> AsyncIterator[RequestEvent]:
        """All events, from the first one on.

        Raises:
            RequestError: the request was refused, or it failed.
        """
        seen = 0
        while True:
            while seen < len(self.events):
                yield self.events[seen]
                seen += 1
            if self.ended:
                break
            await self.more(seen)
        if self.error is not None:
            raise self.error

    async def _read(self) -> None:
        try:
            while True:
                self._take(await anext(self._source))
        except StopAsyncIteration:
            pass
        except RequestError as error:
            self.error = error
        except Exception as error:
            self.error = GenerationFailedError("INTERNAL", "the completion's reader broke")
            raise error
        finally:
            self._source.close()
            self._end()

    def _take(self, event: RequestEvent) -> None:
        self.events.append(event)
        if isinstance(event, Delta):
            if event.index == 0:
                self.text += event.text
            if not self.has_tokens:
                self.has_tokens = True
                self._on_change(self)
        elif isinstance(event, Finished) and event.index == 0:
            self.finished = event
        self._notify()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_change(self)
            self._notify()

    def _notify(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()
