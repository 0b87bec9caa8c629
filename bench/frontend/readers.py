"""Clients that do as little as they can, so that what is measured is the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import orjson

from bench.frontend.stamp import now_ns
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc as pb_grpc
from specdec.errors import SpecdecError

Message = tuple[int, str]  # when it was read, in nanoseconds, and its text
_DATA, _END = b"data: {", b"\n"


class ReaderError(SpecdecError):
    """The server under measurement did not answer as it should."""


class GrpcReader:
    """GenerateStream over one channel."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)

    async def read(self, prompt: str, max_tokens: int) -> AsyncIterator[Message]:
        """The messages that have text."""
        request = pb.GenerateStreamRequest(text=prompt)
        request.stopping.max_tokens = max_tokens
        async for message in self._stub.GenerateStream(request):
            if message.WhichOneof("event") == "delta":
                yield now_ns(), message.delta.text

    async def close(self) -> None:
        """Ends the channel."""
        await self._channel.close()


class HttpReader:
    """POST /v1/completions, each over a connection that is kept."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def read(self, prompt: str, max_tokens: int) -> AsyncIterator[Message]:
        """The messages that have text.

        Raises:
            ReaderError: the answer is not 200.
        """
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        body = orjson.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.partition(b"\r\n")[0]:
            raise ReaderError(status.partition(b"\r\n")[0].decode("latin-1"))
        # The body is chunked; the lines we look for are never broken by a chunk's length, which has its own line.
        while (line := await reader.readuntil(_END)) != b"0\r\n":
            if line.startswith(_DATA):
                text = orjson.loads(line[len(_DATA) - 1 :])["choices"][0]["text"]
                if text:
                    yield now_ns(), text
        await reader.readuntil(_END)
        self._idle.append((reader, writer))

    async def close(self) -> None:
        """Ends the connections."""
        for _, writer in self._idle:
            writer.close()
