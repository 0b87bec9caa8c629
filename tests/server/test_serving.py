"""Health, reflection, drain, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from server.engine_supervisor import EngineStartError
from server.grpc.server import SERVICES, V1, V1ALPHA
from server.serving import Addresses, Serving
from specdec.config import EngineConfig
from specdec.core.types import EngineInfo
from specdec.errors import ConfigError
from tests.fake_engine import ECHO
from tests.models.tiny import make_tiny_model
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import (
    Harness,
    make_config,
    quick_policy,
    reflection_of,
    refused,
    rich,
    running_server,
    stream_request,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(server: Harness, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
    return status


async def test_health_watch_reports_loading_ready_restart_and_drain() -> None:
    async with running_server(wait=False) as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", *SERVICES)]
        seen = [[(await watch.read()).status for watch in watches]]
        await server.serving.wait_ready()
        seen.append([(await watch.read()).status for watch in watches])
        pid = server.serving.client.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        seen.append([(await watch.read()).status for watch in watches])
        seen.append([(await watch.read()).status for watch in watches])
        stopping = asyncio.create_task(server.serving.stop())
        seen.append([(await watch.read()).status for watch in watches])
        await stopping
    assert seen == [
        [status] * (1 + len(SERVICES)) for status in (NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING)
    ]


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with running_server() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(server, "specdec.api.v1.NoSuchService")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_bug_a_method_that_grpcs_health_servicer_leaves_out_is_not_implemented(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its callers, which need no key, got INTERNAL, and the log a traceback of each call."""
    async with running_server() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.channel.unary_unary("/grpc.health.v1.Health/List")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_both_reflection_versions_list_the_services() -> None:
    async with running_server() as server:
        for version in (V1, V1ALPHA):
            asks = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=version),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
            ]
            listed, *files = [answer async for answer in reflection_of(server.channel, version)(iter(asks))]
            names = {s.name for s in listed.list_services_response.service}
            assert names == {*SERVICES, "grpc.health.v1.Health", V1, V1ALPHA}
            own, generation = (
                [FileDescriptorProto.FromString(data) for data in answer.file_descriptor_response.file_descriptor_proto]
                for answer in files
            )
            (file,) = own
            assert f"{file.package}.{file.service[0].name}" == version
            types = {field.type_name for message in file.message_type for field in message.field if field.type_name}
            assert {name.rpartition(".")[0] for name in types} == {f".{file.package}"}
            assert file.service[0].method[0].input_type == f".{file.package}.ServerReflectionRequest"
            assert SERVICES[0] in {f"{f.package}.{service.name}" for f in generation for service in f.service}


async def test_a_drain_finishes_running_calls_and_rejects_new_ones() -> None:
    async with running_server() as server:
        call = server.generation.GenerateStream(stream_request("x" * 15, salt="slow"))
        await anext(aiter(call))
        stopping = asyncio.create_task(server.serving.stop(drain_s=20))
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.generation.GenerateStream(stream_request()).read()
        assert await check(server) == NOT_SERVING
        messages = [m async for m in call]
        await asyncio.wait_for(stopping, 10)
    assert messages[-1].WhichOneof("event") == "finished"
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert rich(caught.value)[ErrorInfo].reason == "DRAINING"
    assert RetryInfo in rich(caught.value)


async def test_a_drain_that_times_out_ends_calls_as_unavailable() -> None:
    async with running_server() as server:
        call = server.generation.GenerateStream(stream_request("x" * 120, salt="slow"))
        await anext(aiter(call))
        stopping = asyncio.create_task(server.serving.stop(drain_s=0.2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        await asyncio.wait_for(stopping, 10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "shut down" in str(caught.value.details())


async def run_until_ready(serving: Serving) -> tuple[asyncio.Task[None], Addresses]:
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()

    def on_ready(addresses: Addresses, _: EngineInfo) -> None:
        ready.set_result(addresses)

    running = asyncio.create_task(serving.run(on_ready))
    await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await running  # raises the error with which it ended
    return running, ready.result()


@pytest.fixture
def hangup() -> Iterator[Callable[[Any], None]]:
    """Sets what SIGHUP does before the server runs."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_and_a_closed_terminal_drain(number: int, hangup: Callable[[Any], None]) -> None:
    hangup(lambda *_: None)  # so that a server that does not handle it fails the test, not the run
    serving = Serving(make_config(drain_s=30), lambda _: FakeTokenizer(), factory=ECHO)
    running, addresses = await run_until_ready(serving)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
        call = Harness(serving, addresses, channel).generation.GenerateStream(stream_request("x" * 10, salt="slow"))
        await anext(aiter(call))
        os.kill(os.getpid(), number)
        assert [m async for m in call][-1].WhichOneof("event") == "finished"
        await asyncio.wait_for(running, 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_the_process_group_does_not_end_the_engine(number: int) -> None:
    async with running_server() as server:
        pid = server.serving.client.engine.pid
        assert pid is not None
        os.kill(pid, number)
        answer = [m async for m in server.generation.GenerateStream(stream_request(), timeout=20)]
        assert answer[-1].WhichOneof("event") == "finished"
        assert server.serving.client.engine.pid == pid
        assert os.getsid(pid) != os.getsid(0)  # a terminal's Ctrl-C does not reach it before it can ignore signals


async def test_a_closed_terminal_does_nothing_under_nohup(hangup: Callable[[Any], None]) -> None:
    hangup(signal.SIG_IGN)
    serving = Serving(make_config(), lambda _: FakeTokenizer(), factory=ECHO)
    running, _ = await run_until_ready(serving)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_the_first_signal_logs_the_running_calls_and_the_second_exits_immediately(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serving = Serving(make_config(drain_s=3600), lambda _: FakeTokenizer(), factory=ECHO)
    running, addresses = await run_until_ready(serving)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
        call = Harness(serving, addresses, channel).generation.GenerateStream(stream_request(salt="hang"))
        await asyncio.wait_for(wait_for_calls(serving, 1), 10)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(logged(caplog, "SIGINT: waiting up to 3600 s for 1 call to end; a second signal"), 10)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(running, 10)
        assert (await refused(call)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert time.monotonic() - began < 4.0  # the engine hangs, and would be waited for longer than that


async def wait_for_calls(serving: Serving, count: int) -> None:
    while serving.client.in_flight < count:
        await asyncio.sleep(0.01)


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    while text not in caplog.text:
        await asyncio.sleep(0.01)


async def test_engine_log_lines_are_logged_once_under_their_own_loggers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_server() as server:
        call = server.generation.GenerateStream(stream_request(salt="bug"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await asyncio.wait_for(logged(caplog, "a secret of the inside"), 10)
    (record,) = [r for r in caplog.records if "submit of request" in r.message]
    assert (record.name, record.levelname) == ("__main__", "ERROR")
    assert record.message.startswith("submit of request")
    assert "\nTraceback" in record.message  # one record, so that a log of JSON lines keeps the cause with its level
    assert record.message.endswith("a secret of the inside")


async def test_the_tokenizer_is_loaded_while_the_engine_starts(tmp_path: Path) -> None:
    def load(engine: EngineConfig) -> FakeTokenizer:
        (tmp_path / "tokenizer-read").touch()
        return FakeTokenizer()

    factory = f"{ECHO}_behind_the_tokenizer"
    serving = Serving(make_config(target=str(tmp_path)), load, factory=factory, policy=quick_policy())
    await serving.start()
    try:
        await serving.wait_ready()
    finally:
        await serving.stop()


def test_the_server_process_needs_no_torch(tmp_path: Path) -> None:
    """It takes seconds to import, and 200 MB."""
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)  # a type that numpy does not have
    code = (
        "import server.serving, sys; from pathlib import Path; from specdec.models.resolve import load_tokenizer; "
        "load_tokenizer(sys.argv[1], Path(sys.argv[2])); print('torch' in sys.modules)"
    )
    call = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    found = subprocess.run(call, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


async def test_run_ends_when_the_engine_cannot_start_or_crashes_too_often() -> None:
    missing = Serving(make_config(target="missing"), lambda _: FakeTokenizer(), factory=ECHO)
    with pytest.raises(EngineStartError, match="cannot be found"):
        await asyncio.wait_for(missing.run(lambda *_: None), 20)
    frail = Serving(make_config(), lambda _: FakeTokenizer(), factory=ECHO, policy=quick_policy(give_up_after=1))
    running, _ = await run_until_ready(frail)
    assert frail.client.engine.pid is not None
    os.kill(frail.client.engine.pid, signal.SIGKILL)
    with pytest.raises(EngineStartError, match="signal 9"):
        await asyncio.wait_for(running, 10)


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for ports in ({"grpc_port": port}, {"http_port": port}):
            config = make_config()
            config = config.model_copy(update={"server": config.server.model_copy(update=ports)})
            with pytest.raises(ConfigError, match=f"{port}.*in use"):
                await Serving(config, lambda _: FakeTokenizer(), factory=ECHO).start()


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", 1), ("127.0.0.1", 0)])
async def test_an_open_server_warns_once(host: str, warns: int, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(host=host, http_port=0):
        pass
    assert caplog.text.count("NO KEYS: ANY MACHINE") == warns
