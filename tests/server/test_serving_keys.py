"""The server that `specdec serve` runs requires keys on every gRPC service, and logs rejected callers."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from specdec.api.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from tests.fake_engine import FLUSHED
from tests.server.auth.key_files import make_key
from tests.server.harness import running_server, stream_request
from tests.server.observe.logs.capture import logged


async def code_of(call: grpc.aio.Call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_every_service_needs_a_key_and_admin_services_an_admin_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    user = (("authorization", f"Bearer {make_key(file, 'user', 'team')}"),)
    operator = (("authorization", f"Bearer {make_key(file, 'operator', admin=True)}"),)
    with logged() as lines:
        async with running_server(keys_file=file) as server:
            admin = admin_pb2_grpc.AdminServiceStub(server.channel)
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                load = server.models.GetLoad(model_pb2.GetLoadRequest(), metadata=metadata)
                assert await code_of(load) == grpc.StatusCode.UNAUTHENTICATED
                flush = admin.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata)
                assert await code_of(flush) == grpc.StatusCode.UNAUTHENTICATED
            call = server.generation.GenerateStream(stream_request("hello"), metadata=user)
            assert [m async for m in call][-1].WhichOneof("event") == "finished"
            flush = admin.FlushCache(admin_pb2.FlushCacheRequest(), metadata=user)
            assert await code_of(flush) == grpc.StatusCode.PERMISSION_DENIED
            flush = admin.FlushCache(admin_pb2.FlushCacheRequest(), metadata=operator)
            assert (await flush).pages == FLUSHED
    assert [line["reason"] for line in lines.of("call", status="UNAUTHENTICATED")] == ["UNAUTHENTICATED"] * 4
    line, flushed = lines.of("call", status="OK")
    assert (line["key"], line["tenant"]) == ("user", "team")
    assert flushed["key"] == "operator"
