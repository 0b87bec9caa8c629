"""An editor's stream, both ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc

from specdec.api.v1 import completion_pb2 as pb
from specdec.client.call_error import CallError


class SessionCall:
    """Messages of CompletionService.CompleteSession. Use as ``async with``: leaving it ends what is being generated.
    It is not tried again: send the setup and the documents on a new one."""

    def __init__(self, call: Any, address: str) -> None:
        self._call, self._address = call, address

    async def __aenter__(self) -> SessionCall:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def send(self, message: pb.CompleteSessionRequest) -> None:
        """One message to the server.

        Raises:
            CallError: the stream has ended.
        """
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise CallError.of(error, self._address) from None

    async def done(self) -> None:
        """Nothing more will be sent; what was asked is still answered."""
        await self._call.done_writing()

    async def __aiter__(self) -> AsyncIterator[pb.CompleteSessionResponse]:
        """The server's messages, until it ends the stream.

        Raises:
            CallError: it ends with an error.
        """
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise CallError.of(error, self._address) from None
