"""Through how many of the project's files a streamed request runs in the front end's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import httpx

from specdec.api.v1 import generation_pb2_grpc
from tests.server.harness import running_server, stream_request

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specdec", "server", "draft", "verify_kernels")


@contextmanager
def traced_files() -> Iterator[set[str]]:
    """Collects the project's files of which a function runs in this thread."""
    found: set[str] = set()
    codes: set[Any] = set()

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(None)
        for code in codes:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT) and (name := path.relative_to(ROOT)).parts[0] in PACKAGES:
                found.add(str(name))


async def files_of(work: Callable[[], Awaitable[None]]) -> set[str]:
    """Of a request like one that was answered before."""
    await work()
    with traced_files() as found:
        await work()
        await asyncio.sleep(0.05)
    return found


async def test_a_streamed_completion_passes_through_few_files() -> None:
    async with running_server(http_port=0) as harness:
        url = f"http://127.0.0.1:{harness.addresses.http_port}/v1/completions"
        async with httpx.AsyncClient() as client:

            async def ask() -> None:
                async with client.stream("POST", url, json={"prompt": "hello", "stream": True}) as response:
                    assert (await response.aread()).endswith(b"data: [DONE]\n\n")

            found = await files_of(ask)
    assert 0 < len(found) <= 30, "\n".join(sorted(found))


async def test_a_grpc_stream_passes_through_few_files() -> None:
    async with (
        running_server() as harness,
        grpc.aio.insecure_channel(f"127.0.0.1:{harness.addresses.grpc_port}") as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask() -> None:
            assert [answer async for answer in stub.GenerateStream(stream_request())][-1].HasField("finished")

        found = await files_of(ask)
    assert 0 < len(found) <= 27, "\n".join(sorted(found))
