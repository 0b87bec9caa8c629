"""Calls of one server: key, deadline, retries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from specdec.client.call_error import CallError
from specdec.client.credentials import Credentials
from specdec.client.retry_policy import RetryPolicy

# Statistics and log-probabilities of a long answer exceed gRPC's default of 4 MiB.
_OPTIONS = [("grpc.max_receive_message_length", -1)]


class Connection:
    """One channel, opened at the first call. Belongs to one event loop; `close` it.

    address: ``host:port``.

    Raises:
        ConfigError: a file of the credentials can not be read.
    """

    def __init__(self, address: str, credentials: Credentials, retry: RetryPolicy) -> None:
        self.address = address
        self._metadata, self._secret = credentials.metadata, credentials.channel()
        self._retry = retry
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel that calls go through."""
        if self._channel is None:
            if self._secret is None:
                self._channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._secret, _OPTIONS)
        return self._channel

    async def close(self) -> None:
        """End every call."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """The answer to one message.

        Raises:
            CallError: the last try failed, or none is worth it.
        """
        until = _end(timeout_s)
        attempt = 0
        while True:
            attempt += 1
            try:
                return await method(request, metadata=self._metadata, timeout=_left(until))
            except grpc.aio.AioRpcError as error:
                await self._pause(CallError.of(error, self.address), attempt, until)

    async def stream(self, method: Any, request: Any, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """The messages that answer one; close it to cancel the call. Tried again only until the first one came.

        Raises:
            CallError: the last try failed, or none is worth it.
        """
        until = _end(timeout_s)
        attempt, began = 0, False
        while True:
            attempt += 1
            call = method(request, metadata=self._metadata, timeout=_left(until))
            try:
                async for message in call:
                    began = True
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                failure = CallError.of(error, self.address)
                if began:
                    raise failure from None
                await self._pause(failure, attempt, until)
            finally:
                call.cancel()

    def both_ways(self, method: Any) -> Any:
        """A call that streams in both directions; it is not tried again."""
        return method(metadata=self._metadata)

    async def _pause(self, error: CallError, attempt: int, until: float | None) -> None:
        """Wait until the next try; raises ``error`` where there is none, or no time for it."""
        pause = self._retry.pause_s(error, attempt, random.random())
        if pause is None or (until is not None and time.monotonic() + pause >= until):
            raise error from None
        await asyncio.sleep(pause)


def _end(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
