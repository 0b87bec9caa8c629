"""Streams whose headers wait for the first token.

A router can repeat a call elsewhere until a byte of the answer has arrived. A stream usually begins with `Started`,
before the prompt is computed. With deferred headers it begins with a token, and a failure before it is an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from specdec.core.types import RequestEvent, Started
from specdec.errors import InvalidRequestError

HOLD_HEADER = "x-specdec-hold-headers"


def holds(asked: str, default: bool) -> bool:
    """Return whether a call's headers wait, by its own header ``asked`` or, if that is empty, by ``default``.

    Raises:
        InvalidRequestError: the header is neither 1 nor 0.
    """
    if asked not in ("", "0", "1"):
        raise InvalidRequestError.of(HOLD_HEADER, "must be 1 to delay headers until the first token, or 0")
    return asked == "1" if asked else default


def from_first_token(events: AsyncIterable[RequestEvent], hold: bool) -> AsyncIterable[RequestEvent]:
    """``events``; if ``hold``, none comes before a token or an end."""
    return _held(events) if hold else events


async def _held(events: AsyncIterable[RequestEvent]) -> AsyncIterator[RequestEvent]:
    waiting: list[RequestEvent] = []
    begun = False
    async for event in events:
        waiting.append(event)
        begun = begun or not isinstance(event, Started)
        while begun and waiting:
            yield waiting.pop(0)
