"""The decision trace, read out of the engine's process by gRPC and by HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import logging
import os
import signal
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from server.engine_client import MAX_TRACE_STEPS
from server.errors import GenerationFailedError
from server.ipc import Frame
from specdec.api.v1 import model_pb2 as pb
from specdec.core.types import trace_step
from specdec.errors import EngineDeadError
from tests.fake_engine import TRACE_STEPS, fake_step
from tests.server.harness import Harness, rich, running_client, running_server, stream_request
from tests.server.observe.metrics.scrape import Scrape
from tests.server.test_engine_client import collect, make_request


async def generate(server: Harness, text: str = "hello", salt: str = "") -> None:
    async for _ in server.generation.GenerateStream(stream_request(text, salt=salt)):
        pass


def get(port: int | None, path: str) -> tuple[int, Any]:
    status, body = read(port, path)
    assert b" " not in body or status != 200  # compact
    return status, json.loads(body)


def read(port: int | None, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


async def test_the_last_steps_newest_last() -> None:
    async with running_client() as client:
        assert await client.trace(5) == []
        await collect(client, make_request(text=b"x" * 50))
        steps = await client.trace(3)
        kept = await client.trace(MAX_TRACE_STEPS)
        at_once = await asyncio.gather(*(client.trace(n) for n in (1, 2, 3)))
    assert steps == [fake_step(n) for n in (48, 49, 50)]
    assert [step.step for step in kept] == list(range(51 - TRACE_STEPS, 51))
    assert [len(found) for found in at_once] == [1, 2, 3]


async def test_a_running_engine_answers_between_steps() -> None:
    async with running_client() as client:
        async with client.generate(make_request(text=b"x" * 100, salt="slow")) as stream:
            await anext(stream)
            first = await client.trace(1)
            second = await client.trace(1)
        assert first[0].step < second[0].step


async def test_an_error_in_the_trace_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)  # the child's own log comes at this level
    async with running_client() as client:
        await collect(client, make_request(salt="untold"))
        with pytest.raises(GenerationFailedError, match="command failed") as caught:
            await client.trace(1)
        assert len(await collect(client, make_request("after"))) > 1
        assert client.engine.restarts == 0
    assert "secret" not in str(caught.value)


async def test_a_read_ends_with_the_engine() -> None:
    async with running_client() as client:
        hanging = asyncio.create_task(collect(client, make_request(salt="hang")))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(client.trace(1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert client.engine.pid is not None
        os.kill(client.engine.pid, signal.SIGKILL)
        for task in (waiting, hanging):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(task, 10)
        with pytest.raises(EngineDeadError):
            await client.trace(1)
        await client.engine.wait_ready()
        assert await client.trace(1) == []


async def test_an_answer_without_a_reader_is_dropped() -> None:
    async with running_client() as client:
        leaving = asyncio.create_task(client.trace(1))
        await asyncio.sleep(0)
        leaving.cancel()
        for number in (1, 99):
            client.on_frame([Frame.ADMIN, number, None, []])
        assert await client.trace(1) == []
        for number in (1, 2):
            client.on_frame([Frame.ADMIN, number, None, []])
    assert leaving.cancelled()


async def test_grpc_returns_steps_and_names_a_bad_limit() -> None:
    async with running_server() as server:
        await generate(server, "x" * 59)
        last = await server.models.GetTrace(pb.GetTraceRequest(limit=2))
        everything = await server.models.GetTrace(pb.GetTraceRequest(limit=MAX_TRACE_STEPS))
        by_default = await server.models.GetTrace(pb.GetTraceRequest())
        for limit in (0, MAX_TRACE_STEPS + 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.models.GetTrace(pb.GetTraceRequest(limit=limit))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in rich(caught.value)[BadRequest].field_violations] == ["limit"]
    assert [trace_step(json.loads(step)) for step in last.steps_json] == [fake_step(59), fake_step(60)]
    assert everything.steps_json[-2:] == last.steps_json
    assert len(everything.steps_json) == len(by_default.steps_json) == TRACE_STEPS


async def test_before_the_engine_is_ready_there_is_no_trace() -> None:
    async with running_server(wait=False, http_port=0) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.models.GetTrace(pb.GetTraceRequest())
        status, answer = await asyncio.to_thread(get, server.addresses.http_port, "/trace")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert rich(caught.value)[ErrorInfo].reason == "ENGINE_UNAVAILABLE"
    assert (status, "loading" in answer["error"]) == (503, True)


async def test_bug_a_query_that_names_another_model_is_refused() -> None:
    async with running_server(http_port=0) as server:
        port, name = server.addresses.http_port, server.serving.models.first.info.target
        for path in ("/trace", "/v1/loads"):
            assert (await asyncio.to_thread(get, port, f"{path}?model={name}"))[0] == 200
            status, answer = await asyncio.to_thread(get, port, f"{path}?model=another")
            assert (status, "'another' is not served here" in str(answer)) == (404, True)
        assert (await asyncio.to_thread(get, port, "/livez?model=another"))[0] == 200


async def test_http_returns_steps_and_names_a_bad_limit() -> None:
    async with running_server(http_port=0) as server:
        port = server.addresses.http_port
        assert await asyncio.to_thread(get, port, "/trace") == (200, [])
        await generate(server)
        status, steps = await asyncio.to_thread(get, port, "/trace?limit=2")
        for bad in ("0", "-1", str(MAX_TRACE_STEPS + 1), "", "x", "1.5", "%D9%A3", "9" * 5000):
            assert await asyncio.to_thread(get, port, f"/trace?limit={bad}") == (
                400,
                {"error": f"limit: must lie in 1..{MAX_TRACE_STEPS}"},
            )
        await generate(server, salt="untold")
        assert (await asyncio.to_thread(get, port, "/trace"))[0] == 500
        _, metrics = await asyncio.to_thread(read, port, "/metrics")
    assert Scrape(metrics.decode()).by_label("specdec_refusals_total", "reason") == {
        "INVALID_ARGUMENT": 8,
        "INTERNAL": 1,
    }
    wanted = dataclasses.asdict(fake_step(6))
    del wanted["replay"]
    assert (status, [step["step"] for step in steps], steps[-1]) == (200, [5, 6], wanted)
