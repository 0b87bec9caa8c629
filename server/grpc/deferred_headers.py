"""The messages of a stream, of which the first waits for the first token where that is asked for."""

from __future__ import annotations

from typing import Any

import grpc

from server.hold_headers import HOLD_HEADER, holds, precedes_tokens
from specdec.core.types import RequestEvent


class DeferredHeaders:
    """gRPC sends its initial metadata with a call's first message: as long as none went out, a failure is all that the
    client gets, and its library, or a proxy, may repeat the call.

    Raises:
        InvalidRequestError: the call's metadata ask for something that there is not.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], default: bool) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self._context, self._holding = context, holds(str(metadata.get(HOLD_HEADER, "")), default)
        self._held: list[Any] = []

    async def write(self, event: RequestEvent, message: Any) -> None:
        """Send ``message``, which tells of ``event``, once the stream may begin."""
        if self._holding:
            self._held.append(message)
            if precedes_tokens(event):
                return
            self._holding = False
            for held in self._held:
                await self._context.write(held)
            self._held.clear()
        else:
            await self._context.write(message)
