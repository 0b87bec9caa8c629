"""The status table of gRPC conventions, row by row: what happens, its code, reason, details and hint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ResourceInfo

from specdec.api.v1 import admin_pb2, model_pb2, options_pb2
from specdec.api.v1 import generation_pb2 as pb
from tests.server.auth.key_files import make_key
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import failed, refused, rich, stream_request
from tests.server.secure_harness import SecureServer, secure_server

Error = grpc.aio.AioRpcError
Scenario = Callable[[SecureServer, Any], Awaitable[Error]]
CODE = grpc.StatusCode


async def ends(stubs: Any, **values: Any) -> Error:
    """How a stream ends."""
    timeout = values.pop("timeout", None)
    text = values.pop("text", "hello")
    return await refused(stubs.generation.GenerateStream(stream_request(text, **values), timeout=timeout))


async def running(stubs: Any, **values: Any) -> Any:
    """A stream that runs for seconds."""
    call = stubs.generation.GenerateStream(stream_request("x" * 100, salt="slow", **values))
    await anext(aiter(call))
    return call


async def bad_parameter(server: SecureServer, stubs: Any) -> Error:
    return await ends(stubs, sampling=options_pb2.SamplingOptions(temperature=-1))


async def context_too_long(server: SecureServer, stubs: Any) -> Error:
    return await ends(stubs, text="x" * 200)


async def no_fim_tokens(server: SecureServer, stubs: Any) -> Error:
    request = pb.GenerateStreamRequest(fim=options_pb2.FimPrompt(prefix="a", suffix="b"))
    return await refused(stubs.generation.GenerateStream(request))


async def no_chat_template(server: SecureServer, stubs: Any) -> Error:
    chat = options_pb2.ChatPrompt(messages=[options_pb2.ChatMessage(role="user", content="x")])
    return await refused(stubs.generation.GenerateStream(pb.GenerateStreamRequest(chat=chat)))


async def unknown_model(server: SecureServer, stubs: Any) -> Error:
    error = await ends(stubs, model="other")
    assert rich(error)[ResourceInfo].resource_name == "other"
    return error


async def duplicate_id(server: SecureServer, stubs: Any) -> Error:
    call = await running(stubs, request_id="one")
    error = await ends(stubs, request_id="one")
    call.cancel()
    return error


async def queue_full(server: SecureServer, stubs: Any) -> Error:
    return await ends(stubs, salt="full")


async def queue_full_of_tokens(server: SecureServer, stubs: Any) -> Error:
    # `hang` sends no event of the engine, so the prompt waits.
    waiting = stubs.generation.GenerateStream(stream_request("x" * 100, salt="hang"))
    async with asyncio.timeout(5):
        while not server.admission.waiting_tokens:
            await asyncio.sleep(0.01)
    error = await ends(stubs, text="x" * 100)
    waiting.cancel()
    return error


async def rate_limit(server: SecureServer, stubs: Any) -> Error:
    while True:
        try:
            await stubs.generation.Generate(pb.GenerateRequest(text="x"))
        except Error as error:
            return error


async def too_late(server: SecureServer, stubs: Any) -> Error:
    for _ in range(6):  # a third of a second each
        async for _ in stubs.generation.GenerateStream(stream_request("xxxxx", salt="slow")):
            pass
    calls = [await running(stubs) for _ in range(8)]  # every place is taken
    error = await ends(stubs, timeout=0.1)
    for call in calls:
        call.cancel()
    return error


async def deadline_passed(server: SecureServer, stubs: Any) -> Error:
    return await ends(stubs, text="x" * 100, salt="slow", timeout=0.3)


async def cancelled(server: SecureServer, stubs: Any) -> Error:
    call = await running(stubs)
    call.cancel()
    try:
        await call.code()
        return Error(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata())
    finally:
        async with asyncio.timeout(5):
            while server.client.in_flight or server.admission.in_flight:
                await asyncio.sleep(0.01)


async def superseded(server: SecureServer, stubs: Any) -> Error:
    scheduling = options_pb2.SchedulingOptions(supersedes_key="document")
    older = await running(stubs, scheduling=scheduling)
    newer = await running(stubs, scheduling=scheduling)
    error = await refused(older)
    newer.cancel()
    return error


async def loading(server: SecureServer, stubs: Any) -> Error:
    info = await failed(stubs.models.GetServerInfo(model_pb2.GetServerInfoRequest()))
    assert info.code() == CODE.UNAVAILABLE
    return await ends(stubs)


async def draining(server: SecureServer, stubs: Any) -> Error:
    await server.model.gate.drain(0)
    return await ends(stubs)


async def engine_killed(server: SecureServer, stubs: Any) -> Error:
    call = await running(stubs)
    assert server.client.engine.pid is not None
    os.kill(server.client.engine.pid, signal.SIGKILL)
    return await refused(call)


async def engine_restarting(server: SecureServer, stubs: Any) -> Error:
    await engine_killed(server, stubs)
    return await ends(stubs)


async def no_credential(server: SecureServer, stubs: Any) -> Error:
    async with server.stubs() as strangers:
        return await ends(strangers)


async def wrong_credential(server: SecureServer, stubs: Any) -> Error:
    async with server.stubs("sd-wrong") as strangers:
        return await ends(strangers)


async def not_an_operator(server: SecureServer, stubs: Any) -> Error:
    return await failed(stubs.admin.FlushCache(admin_pb2.FlushCacheRequest()))


async def engine_bug(server: SecureServer, stubs: Any) -> Error:
    return await ends(stubs, salt="bug")


async def model_breaks_down(server: SecureServer, stubs: Any) -> Error:
    return await ends(stubs, salt="broken")


@dataclass(frozen=True)
class Row:
    """``more``: names of details in addition to ErrorInfo. ``server``: its settings. ``keys``: limits of the
    caller's key, None for a server without keys. ``breaks``: the server needs replacing afterwards."""

    scenario: Scenario
    code: grpc.StatusCode
    reason: str = ""
    more: tuple[str, ...] = ()
    retry: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] | None = None
    breaks: bool = False

    def __str__(self) -> str:
        return self.scenario.__name__  # type: ignore[attr-defined]


TABLE = [
    Row(bad_parameter, CODE.INVALID_ARGUMENT, "INVALID_ARGUMENT", ("BadRequest",)),
    Row(
        context_too_long, CODE.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", metadata={"limit": "127", "got": "201"},
    ),
    Row(no_fim_tokens, CODE.FAILED_PRECONDITION, "FIM_NOT_SUPPORTED"),
    Row(
        no_chat_template, CODE.FAILED_PRECONDITION, "CHAT_NOT_SUPPORTED",
        server={"tokenizer": lambda: FakeTokenizer(has_chat=False)},
    ),
    Row(unknown_model, CODE.NOT_FOUND, "MODEL_NOT_FOUND", ("ResourceInfo",)),
    Row(duplicate_id, CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    Row(queue_full, CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry=True, metadata={"limit": "7"}),
    Row(
        queue_full_of_tokens, CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry=True, metadata={"limit": "150"},
        server={"max_queued_tokens": 150},
    ),
    Row(
        rate_limit, CODE.RESOURCE_EXHAUSTED, "RATE_LIMITED", ("QuotaFailure",), retry=True,
        metadata={"limit": "requests_per_minute", "value": "2"}, keys={"requests_per_minute": 2},
    ),
    Row(too_late, CODE.RESOURCE_EXHAUSTED, "DEADLINE_UNATTAINABLE", retry=True),
    Row(deadline_passed, CODE.DEADLINE_EXCEEDED),
    Row(cancelled, CODE.CANCELLED),
    Row(superseded, CODE.ABORTED, "SUPERSEDED"),
    Row(loading, CODE.UNAVAILABLE, "ENGINE_UNAVAILABLE", retry=True, breaks=True),
    Row(draining, CODE.UNAVAILABLE, "DRAINING", retry=True, breaks=True),
    Row(engine_killed, CODE.UNAVAILABLE, "ENGINE_UNAVAILABLE", retry=True, breaks=True),
    Row(engine_restarting, CODE.UNAVAILABLE, "ENGINE_UNAVAILABLE", retry=True, breaks=True),
    Row(no_credential, CODE.UNAUTHENTICATED, "UNAUTHENTICATED", keys={}),
    Row(wrong_credential, CODE.UNAUTHENTICATED, "UNAUTHENTICATED", keys={}),
    Row(not_an_operator, CODE.PERMISSION_DENIED, "PERMISSION_DENIED", keys={}),
    Row(engine_bug, CODE.INTERNAL, "INTERNAL"),
    Row(model_breaks_down, CODE.INTERNAL, "MODEL_BROKEN"),
]  # fmt: skip


# Rows that leave the server and its configuration as they are share one.
PLAIN = [row for row in TABLE if not row.server and row.keys is None and not row.breaks]


async def test_rows_of_an_undisturbed_server() -> None:
    assert len(PLAIN) == 12
    async with secure_server() as server, server.stubs() as stubs:
        for row in PLAIN:
            check(row, await asyncio.wait_for(row.scenario(server, stubs), 20))
            await served(server, stubs)


@pytest.mark.parametrize("row", [row for row in TABLE if row not in PLAIN], ids=str)
async def test_row(row: Row, tmp_path: Path) -> None:
    config, key = dict(row.server), None
    if row.keys is not None:
        config["keys_file"] = tmp_path / "keys.yaml"
        key = make_key(tmp_path / "keys.yaml", "a", **row.keys)
    async with secure_server(wait=row.scenario is not loading, **config) as server, server.stubs(key) as stubs:
        check(row, await asyncio.wait_for(row.scenario(server, stubs), 20))
        if row.scenario not in (draining, loading):  # a rejected call costs the others nothing
            await served(server, stubs, None if row.keys is None else tmp_path)


def check(row: Row, error: Error) -> None:
    """Check that ``error`` is the one that ``row`` describes."""
    assert error.code() == row.code, row
    assert "secret" not in str(error.details())
    if not row.reason:
        return  # the client cancels the call itself, and may do so before the server's status arrives
    found = {kind.DESCRIPTOR.name: detail for kind, detail in rich(error).items()}
    assert set(found) == {"ErrorInfo", *row.more, *(["RetryInfo"] if row.retry else [])}, row
    info = found["ErrorInfo"]
    assert (info.reason, info.domain) == (row.reason, "specdec"), row
    assert dict(info.metadata) == row.metadata or not row.metadata, row
    pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
    assert (pushback is not None) == row.retry, row
    if row.retry:
        seconds = found["RetryInfo"].retry_delay.ToTimedelta().total_seconds()
        assert seconds == 2.5 if row.scenario is queue_full else seconds > 0
        assert float(str(pushback)) == pytest.approx(seconds * 1e3, abs=1)


async def served(server: SecureServer, stubs: Any, keys: Path | None = None) -> None:
    """Check that another caller is served once the engine is ready."""
    if server.client.engine.pid is not None and server.admission.waiting_tokens:
        os.kill(server.client.engine.pid, signal.SIGKILL)  # it hangs, as instructed
    await asyncio.wait_for(server.client.engine.wait_ready(), 20)
    key = None if keys is None else make_key(keys / "keys.yaml", "other")
    async with server.stubs(key) as others, asyncio.timeout(10):
        while True:
            try:
                answer = await others.generation.Generate(pb.GenerateRequest(text="hi"))
                break
            except Error as error:
                if error.code() not in (CODE.UNAVAILABLE, CODE.UNAUTHENTICATED):
                    raise
                await asyncio.sleep(0.1)
    assert answer.samples
