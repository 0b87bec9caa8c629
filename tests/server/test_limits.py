"""Calls are bounded before they take memory or time, on both ports."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import Descriptor
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from server import body_budget, serving
from server.auth.access import Access, TlsFiles
from server.auth.file_watch import FileWatch
from server.body_budget import BodyBudget, MessageReads
from server.errors import BodiesFullError
from server.grpc import server as grpc_server
from server.grpc.interceptors import METHODS, CallInterceptor, _answered
from server.grpc.wire_limits import MAX_WIRE_FIELDS, check_wire
from server.http import http_server
from server.http.http_server import HttpServer
from server.observe import records
from server.observe.observer import Observer
from specdec.api.v1 import completion_pb2, generation_pb2, generation_pb2_grpc
from specdec.config import ServerConfig
from specdec.core.fields import MAX_STOP_TOKENS
from specdec.errors import InvalidRequestError
from tests.server.auth.certificates import Certificates
from tests.server.harness import refused, rich, running_server, stream_request
from tests.server.long_lists import limit_of, repeated_fields, with_items

GENERATE = generation_pb2.GenerateRequest.DESCRIPTOR


SENT = [(method.input_type, path) for method in METHODS.values() for path in repeated_fields(method.input_type)]


@pytest.mark.parametrize(("descriptor", "path"), SENT, ids=[f"{d.name}-{'.'.join(path)}" for d, path in SENT])
def test_every_repeated_field_has_a_maximum_on_the_wire(descriptor: Descriptor, path: tuple[str, ...]) -> None:
    limit = limit_of(path)
    check_wire(with_items(descriptor, path, limit).SerializeToString(), descriptor)
    with pytest.raises(InvalidRequestError) as caught:
        check_wire(with_items(descriptor, path, limit + 1).SerializeToString(), descriptor)
    (violation,) = caught.value.violations
    assert violation.field == ".".join(path)
    assert violation.description == f"at most {limit} items"


def test_items_count_in_every_encoding() -> None:
    ids = with_items(GENERATE, ("stopping", "stop_token_ids"), MAX_STOP_TOKENS // 2 + 1).SerializeToString()
    check_wire(ids, GENERATE)
    number = generation_pb2.GenerateRequest.STOPPING_FIELD_NUMBER
    unpacked = b"\x20\x07" * (MAX_STOP_TOKENS + 1)
    merged, apart = ids + ids, bytes([number << 3 | 2, 0x82, 0x10]) + unpacked
    assert len(generation_pb2.GenerateRequest.FromString(merged).stopping.stop_token_ids) > MAX_STOP_TOKENS
    assert len(generation_pb2.GenerateRequest.FromString(apart).stopping.stop_token_ids) > MAX_STOP_TOKENS
    for data in (merged, apart):
        with pytest.raises(InvalidRequestError, match=r"stopping\.stop_token_ids: at most"):
            check_wire(data, GENERATE)


def test_unknown_fields_count() -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_WIRE_FIELDS} fields"):
        check_wire(b"\xf8\x07\x01" * (MAX_WIRE_FIELDS + 1), GENERATE)


async def test_a_call_with_a_too_long_list_is_rejected_by_name() -> None:
    long: Any = with_items(GENERATE, ("stopping", "stop_token_ids"), 2_000_000)
    setup: Any = with_items(completion_pb2.CompleteSessionRequest.DESCRIPTOR, ("setup", "stopping", "stop"), 65)
    async with running_server() as server:
        request = stream_request("hello")
        request.stopping.CopyFrom(long.stopping)
        session = server.channel.stream_stream(
            "/specdec.api.v1.CompletionService/CompleteSession",
            request_serializer=completion_pb2.CompleteSessionRequest.SerializeToString,
        )(iter([setup]))
        for call, field in (
            (server.generation.GenerateStream(request), "stopping.stop_token_ids"), (session, "setup.stopping.stop")
        ):  # fmt: skip
            error = await refused(call)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in rich(error)[BadRequest].field_violations] == [field]
        assert [message async for message in server.generation.GenerateStream(stream_request("hello"))]


async def until_waiting(budget: BodyBudget) -> None:
    while not budget._waiting:
        await asyncio.sleep(0)


async def test_bodies_share_one_budget() -> None:
    budget = BodyBudget(limit=100, own_bytes=0)
    with budget.body(lambda: None) as first, budget.body(lambda: None) as second:
        await first.reserve(80)
        first.arrived(60)
        waiting = asyncio.create_task(second.reserve(50))
        await until_waiting(budget)
        assert not waiting.done()
        first.arrived(40)
        await waiting
        assert budget.used == 90
    assert budget.used == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_a_call_that_ends_while_its_body_waits_takes_no_room(granted: bool) -> None:
    budget = BodyBudget(limit=100, own_bytes=0)
    with budget.body() as first, budget.body() as second, budget.body() as third:
        await first.reserve(80)
        ending = asyncio.create_task(second.reserve(60))
        await until_waiting(budget)
        behind = asyncio.create_task(third.reserve(20))
        await asyncio.sleep(0)
        assert not behind.done()
        if granted:  # in the same turn of the loop
            first.arrived(30)
        ending.cancel()
        await asyncio.wait([ending])
        await asyncio.wait_for(behind, 5)
        assert budget.used == (50 if granted else 100)
    assert budget.used == 0


async def test_a_body_over_the_budget_is_rejected_and_slow_ones_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 0.05)
    budget, cut = BodyBudget(limit=100, own_bytes=0), asyncio.Event()
    with budget.body(cut.set) as slow, budget.body(lambda: None) as other:
        await slow.reserve(80)
        with pytest.raises(BodiesFullError):
            await other.reserve(50)
        assert not cut.is_set()
        assert budget.used == 80
        monkeypatch.setattr(body_budget, "SLOW_S", -1.0)
        with pytest.raises(BodiesFullError):
            await other.reserve(50)
        assert cut.is_set()


async def test_the_wait_for_room_does_not_make_a_body_slow() -> None:
    budget, clock = BodyBudget(limit=100, own_bytes=0), asyncio.get_running_loop().time
    with budget.body() as first, budget.body(expected=50) as second:
        await first.reserve(80)
        waiting = asyncio.create_task(second.reserve(50))
        await until_waiting(budget)
        second.began_s -= 60
        assert second.is_slow(clock())
        first.arrived(40)
        await waiting
        assert not second.is_slow(clock())


async def test_an_ordinary_body_does_not_wait_for_large_ones() -> None:
    budget = BodyBudget(limit=100, own_bytes=30)
    with budget.body(lambda: None) as large, budget.body(lambda: None) as small:
        await large.reserve(130)
        assert budget.used == 100
        await small.reserve(20)
        await small.reserve(10)
        small.arrived(small.size)
        assert budget.used == 100
        waiting = asyncio.create_task(small.reserve(1))
        await until_waiting(budget)
        large.arrived(120)
        await waiting
        assert budget.used == 91
    assert budget.used == 0


async def test_a_body_is_cut_off_once_and_those_queued_behind_a_rejected_one_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 0.2)
    monkeypatch.setattr(body_budget, "SLOW_S", -1.0)
    budget, cuts = BodyBudget(limit=100, own_bytes=0), []
    with (
        budget.body(lambda: cuts.append("slow")) as slow,
        budget.body(lambda: None) as head,
        budget.body(lambda: None) as next_one,
    ):
        await slow.reserve(60)
        refused = asyncio.create_task(head.reserve(90))
        await until_waiting(budget)
        monkeypatch.setattr(body_budget, "WAIT_S", 20.0)
        served = asyncio.create_task(next_one.reserve(30))
        with pytest.raises(BodiesFullError):
            await refused
        await asyncio.wait_for(served, 5)
    assert cuts == ["slow"]
    assert budget.used == 0


LONGEST_BODIES = 16  # of 16 MiB in 256 MiB


@pytest.mark.parametrize("path", ["/specdec.api.v1.GenerationService/Generate", "/grpc.health.v1.Health/Check"])
async def test_silent_calls_and_uploads_block_no_other(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 600.0)
    monkeypatch.setattr(body_budget, "SLOW_S", 600.0)
    budgets: list[BodyBudget] = []

    class KeptBudget(BodyBudget):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            budgets.append(self)

    monkeypatch.setattr(serving, "BodyBudget", KeptBudget)
    stalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def never() -> AsyncIterator[bytes]:
        await stalled
        yield b""

    async with asyncio.timeout(60), AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_server(http_port=0))
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(
                    f"127.0.0.1:{server.addresses.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
                )
            )
            for _ in range(4 * LONGEST_BODIES)
        ]
        calls = [channel.stream_unary(path)(never()) for channel in channels]
        for _ in range(LONGEST_BODIES):  # bodies of the longest that are never complete
            _, writer = await asyncio.open_connection("127.0.0.1", server.addresses.http_port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (16 << 20))
            writer.write(b" " * (1 << 17))
            stack.callback(writer.close)
        while sum(call.done() for call in calls) < len(calls) - 3 * LONGEST_BODIES // 2:
            await asyncio.sleep(0.01)
        assert {await reason_of(call) for call in calls if call.done()} == {"BODIES_FULL"}
        while max(budget.used for budget in budgets) < 240 << 20:
            await asyncio.sleep(0.01)
        answer = [message async for message in server.generation.GenerateStream(stream_request("hello"))]
        assert answer[-1].WhichOneof("event") == "finished"
        assert not (await server.generation.Abort(generation_pb2.AbortRequest(request_id="a"))).aborted
        large = await refused(server.generation.GenerateStream(stream_request("a" * (1 << 17))))
        assert large.code() == grpc.StatusCode.INVALID_ARGUMENT  # it was read
        stalled.cancel()


async def reason_of(call: Any) -> str:
    """The reason of a refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return rich(caught.value)[ErrorInfo].reason


async def test_stalled_messages_are_dropped_except_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "_READ_LOOK_S", 0.0)
    reads, arrives = MessageReads(4), asyncio.Event()

    async def arrive() -> None:
        async with reads.place():
            await arrives.wait()

    calls = [asyncio.create_task(arrive()) for _ in range(6)]
    await asyncio.wait(calls[2:])
    for call in calls[2:]:
        with pytest.raises(BodiesFullError):
            await call
    assert not any(call.done() for call in calls[:2])
    monkeypatch.setattr(body_budget, "SLOW_LOOKS", 0)
    newer = [asyncio.create_task(arrive()) for _ in range(2)]
    await asyncio.wait(calls[:2])
    arrives.set()
    await asyncio.gather(*newer)
    assert not reads._reading


async def test_a_call_without_a_message_is_refused() -> None:
    messages = CallInterceptor(Access(ServerConfig()), Observer(), BodyBudget())

    class EmptyCall:
        async def read(self) -> Any:
            return grpc.aio.EOF

    empty: Any = EmptyCall()
    with pytest.raises(InvalidRequestError, match="message: is missing"):
        await messages._serve(echo, bytes, empty, empty)
    assert not messages._reads._reading


@pytest.mark.parametrize("has_cause", [False, True])
@pytest.mark.parametrize("kind", [InvalidRequestError, RuntimeError])
async def test_a_refused_call_frees_its_message_at_once(
    kind: type[Exception], has_cause: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KeepingCall:
        async def abort(self, *_: Any) -> None:
            self.kept = grpc.aio.AbortError()
            raise self.kept

    class Message:
        def read(self) -> None:
            raise ValueError("unexpected")

    async def serve(messages: Any, context: Any) -> None:
        message = Message()
        found.append(weakref.ref(message))
        try:
            message.read()
        except ValueError as error:
            raise kind([]) from (error if has_cause else None)

    found: list[weakref.ref[Message]] = []
    call: Any = KeepingCall()
    monkeypatch.setattr(logging.getLogger(records.__name__), "disabled", True)  # pytest keeps what is logged
    gc.disable()
    try:
        with pytest.raises(grpc.aio.AbortError):
            await _answered(serve, call, call)
        assert found[0]() is None
    finally:
        gc.enable()


async def test_large_messages_are_unpacked_one_at_a_time() -> None:
    messages, running, most = CallInterceptor(Access(ServerConfig()), Observer(), BodyBudget()), 0, 0

    def read(_: bytes) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)  # others begin meanwhile, if they may
        running -= 1

    await asyncio.gather(*(messages._unpack(read, bytes(2 << 20)) for _ in range(4)))
    assert most == 1


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; at ``/held`` the answer has no end."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    held = scope["path"] == "/held"
    await send({"type": "http.response.body", "body": str(length).encode(), "more_body": held})
    while held:
        held = (await receive())["type"] != "http.disconnect"


@asynccontextmanager
async def echo_server(budget: BodyBudget | None = None) -> AsyncIterator[str]:
    server = HttpServer(echo, "127.0.0.1", 0, budget=budget)
    port = await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


async def test_http_bodies_count_towards_the_budget() -> None:
    budget = BodyBudget(limit=100_000, own_bytes=10_000)
    async with echo_server(budget) as url, httpx.AsyncClient(base_url=url) as http:
        with budget.body(lambda: None) as other:
            await other.reserve(100_000)
            waiting = asyncio.create_task(http.post("/", content=b"x" * 50_000))
            await asyncio.wait_for(until_waiting(budget), 30)
            assert not waiting.done()
            assert (await http.post("/", content=b"x" * 9_000)).text == "9000"
        assert (await waiting).text == "50000"
    assert budget.used == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_equal_uploads_are_read_in_turn(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 600.0)
    monkeypatch.setattr(body_budget, "SLOW_S", 600.0)
    piece, pieces = 1 << 20, 4
    budget = BodyBudget(pieces * piece, limit=pieces * piece)  # room for one
    head = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (pieces * piece)
    data = (b"%x\r\n" % piece if chunked else b"") + b" " * piece + (b"\r\n" if chunked else b"")
    async with echo_server(budget) as url, asyncio.timeout(60):
        host, port = url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for _, writer in opened:
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n%b\r\n\r\n" % head + data)
        await until_waiting(budget)
        for _, writer in opened:
            writer.write((pieces - 1) * data + (b"0\r\n\r\n" if chunked else b""))
        for reader, writer in opened:
            assert b"%d" % (pieces * piece) in await reader.read()
            writer.close()
    assert budget.used == 0


async def test_a_stalled_upload_is_dropped() -> None:
    cuts: list[str] = []
    budget = BodyBudget(limit=100, own_bytes=0)
    with (
        budget.body(lambda: cuts.append("stalled"), expected=60) as stalled,
        budget.body(lambda: cuts.append("quick"), expected=40) as quick,
        budget.body(expected=10) as other,
    ):
        await stalled.reserve(1)
        await quick.reserve(39)
        for body in (stalled, quick):
            body.began_s -= 3.0
        waiting = asyncio.create_task(other.reserve(1))
        await until_waiting(budget)
        assert cuts == ["stalled"]
        stalled.arrived(0)  # its connection has ended
        await waiting


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"a: b\r\n" * 100 + b"\r\n", b"200"),
        (b"a: b\r\n" * 200 + b"\r\n", b"400"),
        (CHUNKED + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n", b"200"),
        (CHUNKED + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n", b"400"),
        (CHUNKED + b"80\r\n%b\r\n" % (b"x" * 128) * 5000 + b"0\r\n\r\n", b"200"),
    ],
    ids=["headers", "many headers", "small chunks", "many small chunks", "many chunks"],
)
async def test_an_expensive_message_is_rejected(rest: bytes, status: bytes) -> None:
    async with echo_server() as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\n" + rest)
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_a_connection_that_waits_for_a_call_or_a_body_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "connection_limit", lambda: 3)
    head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
    async with echo_server() as url:
        host, port = url.removeprefix("http://").split(":")

        async def connect(path: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            if path:
                writer.write(head % path)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            return reader, writer

        sending, idle, *held = [await connect(path) for path in (b"/", b"", b"/held", b"/held")]
        assert await idle[0].read() == b""
        for _, writer in held:
            writer.write(b"ab")
        held.append(await connect(b"/held"))
        assert await sending[0].read() == b""
        held[-1][1].write(b"ab")
        for reader, _ in held:  # the answer has begun
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        reader, writer = await connect()
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()


async def test_connections_without_a_tls_handshake_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "connection_limit", lambda: 3)
    files = Certificates(tmp_path)
    tls = TlsFiles(files.cert, files.key, None, FileWatch([files.cert], every_s=0))
    server = HttpServer(echo, "127.0.0.1", 0, tls)
    port = await server.start()
    async with asyncio.timeout(60), httpx.AsyncClient(verify=files.client_context()) as http:
        url = f"https://localhost:{port}"
        assert (await http.post(url, content=b"ab")).text == "2"
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, _ in silent[:2]:
            with suppress(ConnectionError):
                assert await reader.read() == b""  # closed
        assert (await http.post(url, content=b"abc")).text == "3"  # over the first connection
        async with httpx.AsyncClient(verify=files.client_context()) as other:
            assert (await other.post(url, content=b"a")).text == "1"
        for _, writer in silent:
            writer.close()
    await server.stop()


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "idle"])
async def test_grpc_connections_without_calls_are_evicted(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "connection_limit", lambda: 4)
    monkeypatch.setattr(grpc_server, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(grpc_server, "IDLE_S", 1.0)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_server())
        port = server.addresses.grpc_port
        for _ in range(4):
            if silent:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
            else:
                channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
                await (await stack.enter_async_context(channel)).channel_ready()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options))
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert not (await stub.Abort(generation_pb2.AbortRequest(request_id="a"), wait_for_ready=True)).aborted


async def test_an_error_with_many_fields_fits_the_trailers() -> None:
    async with running_server() as server:
        request = generation_pb2.GenerateStreamRequest(chat={"messages": [{}] * limit_of(("chat", "messages"))})
        error = await refused(server.generation.GenerateStream(request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert rich(error)[BadRequest].field_violations[0].field == "chat.messages[0].role"
