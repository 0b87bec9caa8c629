"""The engine is killed while many streams run: each ends, as unavailable, and the next ones are served."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import httpx
import pytest

from specdec.api.v1 import model_pb2
from tests.server.harness import Harness, running_server, stream_request

STREAMS = 40


async def grpc_stream(server: Harness, number: int) -> grpc.StatusCode:
    call = server.generation.GenerateStream(stream_request("x" * 100, salt="slow", request_id=f"g{number}"))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def http_stream(client: httpx.AsyncClient, number: int) -> str:
    body = {"prompt": "x" * 100, "max_tokens": 100, "stream": True, "cache_salt": "slow"}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        return (await response.aread()).decode()


async def test_sigkill_under_load_ends_every_stream_and_serving_continues() -> None:
    async with running_server(http_port=0) as server, asyncio.timeout(60):
        url = f"http://127.0.0.1:{server.addresses.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            calls = [asyncio.create_task(grpc_stream(server, number)) for number in range(STREAMS)]
            pages = [asyncio.create_task(http_stream(http, number)) for number in range(STREAMS)]
            client = server.serving.client
            while client.in_flight < 2 * STREAMS or client.engine.load.running_requests == 0:
                await asyncio.sleep(0.02)
            assert client.engine.pid is not None
            os.kill(client.engine.pid, signal.SIGKILL)
            assert await asyncio.gather(*calls) == [grpc.StatusCode.UNAVAILABLE] * STREAMS
            for text in await asyncio.gather(*pages):
                assert '"code":"engine_unavailable"' in text.rstrip().splitlines()[-1]
            assert client.in_flight == 0
            await client.engine.wait_ready()
            assert (await server.models.GetServerInfo(model_pb2.GetServerInfoRequest())).engine_restarts == 1
            again = server.generation.GenerateStream(stream_request("hello"))
            assert [m async for m in again][-1].WhichOneof("event") == "finished"
            metrics = (await http.get("/metrics")).text
    assert f'specdec_requests_total{{outcome="failed"}} {float(2 * STREAMS)}' in metrics
    assert f'specdec_refusals_total{{reason="ENGINE_UNAVAILABLE"}} {float(2 * STREAMS)}' in metrics


async def test_a_silent_engine_ends_its_streams() -> None:
    async with running_server(silent_s=0.8) as server, asyncio.timeout(30):
        calls = [asyncio.create_task(grpc_stream(server, number)) for number in range(5)]
        while server.serving.client.in_flight < 5:
            await asyncio.sleep(0.02)
        cause = server.generation.GenerateStream(stream_request("x", salt="hang"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in cause:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.UNAVAILABLE}
        await server.serving.client.engine.wait_ready()
