"""Streams whose headers wait for the first token.

A router can repeat a call elsewhere until a byte of the answer has arrived. A stream usually begins with `Started`,
before the prompt is computed. With deferred headers it begins with a token, and a failure before it is an error.
"""

from __future__ import annotations

from typing import Any

import grpc

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


class DeferredHeaders:
    """Writes the messages of a gRPC stream, whose initial metadata are sent with the first one.

    Raises:
        InvalidRequestError: the call's metadata hold another value than 0 or 1.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], default: bool) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self._context, self._holding = context, holds(str(metadata.get(HOLD_HEADER, "")), default)
        self._held: list[Any] = []

    async def write(self, event: RequestEvent, message: Any) -> None:
        """Send ``message``, made of ``event``, once the stream may begin."""
        self._held.append(message)
        if self._holding and isinstance(event, Started):
            return
        self._holding, held, self._held = False, self._held, []
        for each in held:
            await self._context.write(each)
