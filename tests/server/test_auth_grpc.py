"""Keys, limits and certificates over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure, RetryInfo
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from server.auth import file_watch
from server.grpc.server import V1, V1ALPHA
from specdec.api.v1 import admin_pb2, model_pb2, options_pb2
from specdec.api.v1 import generation_pb2 as pb
from tests.server.auth.certificates import Certificates
from tests.server.auth.key_files import make_key
from tests.server.harness import failed, reflection_of, refused, rich, stream_request
from tests.server.secure_harness import SecureServer, secure_server


@pytest.fixture(autouse=True)
def _files_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch.FileWatch.__init__, "__defaults__", (0.0, file_watch.time.monotonic))


async def code_of(call: Any) -> grpc.StatusCode:
    """How a unary call ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def whoami(stubs: Any, **values: Any) -> tuple[str, str, str]:
    """Salt, id and priority that the engine received, and the id of the answer."""
    scheduling = options_pb2.SchedulingOptions(priority=values.pop("priority", 0))
    call = stubs.generation.GenerateStream(stream_request("whoami", scheduling=scheduling, **values))
    messages = [message async for message in call]
    assert messages[0].started.request_id == values.get("request_id", messages[0].started.request_id)
    return tuple("".join(m.delta.text for m in messages).split(" "))  # type: ignore[return-value]


async def test_every_call_needs_a_known_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "a")
    async with secure_server(keys_file=path) as server:
        for wrong in (None, "", "sd-wrong", key[:-1]):
            async with server.stubs(wrong) as stubs:
                error = await refused(stubs.generation.GenerateStream(stream_request("hello")))
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
                assert rich(error)[ErrorInfo].reason == "UNAUTHENTICATED"
                for call in (
                    stubs.models.GetServerInfo(model_pb2.GetServerInfoRequest()),
                    stubs.models.GetTrace(model_pb2.GetTraceRequest()),
                    stubs.admin.FlushCache(admin_pb2.FlushCacheRequest()),
                    stubs.generation.Abort(pb.AbortRequest(request_id="x")),
                ):
                    assert await code_of(call) == grpc.StatusCode.UNAUTHENTICATED
        async with server.stubs(key) as stubs:
            assert await code_of(stubs.models.GetServerInfo(model_pb2.GetServerInfoRequest())) == grpc.StatusCode.OK
            assert await code_of(stubs.admin.FlushCache(admin_pb2.FlushCacheRequest())) == (
                grpc.StatusCode.PERMISSION_DENIED
            )
            unknown = stubs.channel.unary_unary("/specdec.api.v1.GenerationService/Nothing")
            assert await code_of(unknown(b"")) == grpc.StatusCode.UNIMPLEMENTED


async def test_metadata_that_contains_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "a")
    known = [("authorization", f"{scheme} {key}") for scheme in ("Bearer", "bearer", "BEARER ")] + [("x-api-key", key)]
    unknown = [("authorization", text) for text in (key, f"Basic {key}", "Bearer", f"Bearer{key}")]
    async with secure_server(keys_file=path) as server, server.stubs() as stubs:
        for header in (*known, *unknown):
            code = await code_of(stubs.models.GetServerInfo(model_pb2.GetServerInfoRequest(), metadata=[header]))
            assert code == (grpc.StatusCode.OK if header in known else grpc.StatusCode.UNAUTHENTICATED), header


@pytest.mark.parametrize("version", [V1, V1ALPHA])
async def test_health_needs_no_key_and_reflection_does(version: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "a")
    ask = reflection_pb2.ServerReflectionRequest(list_services="")

    async def reflects(channel: grpc.aio.Channel, metadata: Any = None) -> bool:
        code = grpc.StatusCode.INTERNAL
        for _ in range(5):  # the client reports INTERNAL if its message was not sent before the server ended the call
            try:
                return bool([m async for m in reflection_of(channel, version)(iter([ask]), metadata=metadata)])
            except grpc.aio.AioRpcError as error:
                code = error.code()
            if code != grpc.StatusCode.INTERNAL:
                break
        assert code == grpc.StatusCode.UNAUTHENTICATED
        return False

    async with secure_server(keys_file=path) as server:
        async with server.stubs() as stubs:
            code = await code_of(stubs.health.Check(health_pb2.HealthCheckRequest()))
            assert (code == grpc.StatusCode.OK, await reflects(stubs.channel)) == (True, False)
            assert await reflects(stubs.channel, [("authorization", f"Bearer {key}")])
        async with server.stubs(key) as stubs:
            assert await code_of(stubs.health.Check(health_pb2.HealthCheckRequest())) == grpc.StatusCode.OK


async def test_the_engine_gets_tenant_scoped_names(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = {name: make_key(path, name, tenant, max_priority=3) for name, tenant in (("a", "one"), ("b", "two"))}
    async with secure_server(keys_file=path) as server:
        async with server.stubs(keys["a"]) as stubs:
            assert await whoami(stubs, salt="s", request_id="r", priority=9) == ("one/s", "one/r", "3")
        async with server.stubs(keys["b"]) as stubs:
            assert await whoami(stubs, salt="one/s", request_id="r", priority=-2) == ("two/one/s", "two/r", "-2")
    async with secure_server() as server, server.stubs() as stubs:
        assert await whoami(stubs, salt="s", request_id="r", priority=9) == ("s", "r", "9")


async def test_a_tenant_cannot_abort_or_block_the_request_of_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = [make_key(path, name, name) for name in ("one", "two")]
    async with (
        secure_server(keys_file=path) as server,
        server.stubs(keys[0]) as mine,
        server.stubs(keys[1]) as theirs,
    ):
        running = mine.generation.GenerateStream(stream_request("x" * 40, salt="slow", request_id="r"))
        await anext(aiter(running))
        assert not (await theirs.generation.Abort(pb.AbortRequest(request_id="r"))).aborted
        assert not (await theirs.generation.Abort(pb.AbortRequest(request_id="one/r"))).aborted
        other = [m async for m in theirs.generation.GenerateStream(stream_request("hi", request_id="r"))]
        assert other[-1].WhichOneof("event") == "finished"
        assert (await mine.generation.Abort(pb.AbortRequest(request_id="r"))).aborted
        assert [m async for m in running][-1].WhichOneof("event") == "finished"


async def test_limits_are_rejected_with_a_retry_delay(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "a", requests_per_minute=2)
    free = make_key(path, "b")
    async with secure_server(keys_file=path) as server, server.stubs(key) as stubs, server.stubs(free) as others:
        for _ in range(2):
            assert await code_of(stubs.generation.Generate(pb.GenerateRequest(text="x"))) == grpc.StatusCode.OK
        for call in (
            stubs.generation.Generate(pb.GenerateRequest(text="x")),
            stubs.generation.Prefill(pb.PrefillRequest(text="x")),
        ):
            error = await failed(call)
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            info = rich(error)[ErrorInfo]
            assert (info.reason, info.metadata["limit"]) == ("RATE_LIMITED", "requests_per_minute")
            wait = rich(error)[RetryInfo].retry_delay.ToTimedelta().total_seconds()
            assert 25 < wait <= 30
            assert rich(error)[QuotaFailure].violations[0].subject == "key:a"
            pushback = dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"]
            assert float(str(pushback)) == pytest.approx(wait * 1e3, abs=1)
        assert await code_of(others.generation.Generate(pb.GenerateRequest(text="x"))) == grpc.StatusCode.OK
        path.write_text(path.read_text().replace("requests_per_minute: 2", "requests_per_minute: 100000"))
        await code_of(stubs.generation.Generate(pb.GenerateRequest(text="x")))  # the used tokens refill faster now
        await asyncio.sleep(0.01)
        assert await code_of(stubs.generation.Generate(pb.GenerateRequest(text="x"))) == grpc.StatusCode.OK
        path.write_text("[]\n# end of keys\n")
        for gone in (stubs, others):
            code = await code_of(gone.generation.Generate(pb.GenerateRequest(text="x")))
            assert code == grpc.StatusCode.UNAUTHENTICATED


async def info_over(server: SecureServer, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    async with server.stubs(None, credentials) as stubs:
        return await code_of(stubs.models.GetServerInfo(model_pb2.GetServerInfoRequest(), timeout=5))


async def test_tls_with_a_certificate_that_changes(tmp_path: Path) -> None:
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    trusts_old, trusts_new = (grpc.ssl_channel_credentials(c.ca_pem) for c in (old, new))
    async with secure_server(tls_cert=old.cert, tls_key=old.key) as server:
        assert await info_over(server, trusts_old) == grpc.StatusCode.OK
        for stranger in (trusts_new, None):
            assert await info_over(server, stranger) == grpc.StatusCode.UNAVAILABLE
        async with server.stubs(None, trusts_old) as stubs:
            running = stubs.generation.GenerateStream(stream_request("x" * 20, salt="slow"))
            await anext(aiter(running))
            new.install(old.cert, old.key)
            assert await info_over(server, trusts_new) == grpc.StatusCode.OK
            assert await info_over(server, trusts_old) == grpc.StatusCode.UNAVAILABLE
            assert [m async for m in running][-1].WhichOneof("event") == "finished"  # the old connection stays open


async def test_mutual_tls_with_an_authority_that_changes(tmp_path: Path) -> None:
    server_side, old, new = (Certificates(tmp_path / name) for name in ("server", "old", "new"))
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(old.ca_pem)

    def client(shown: Certificates) -> grpc.ChannelCredentials:
        pem = shown.client.read_bytes()
        return grpc.ssl_channel_credentials(server_side.ca_pem, pem, pem)

    async with secure_server(tls_cert=server_side.cert, tls_key=server_side.key, tls_client_ca=authorities) as server:
        assert await info_over(server, client(old)) == grpc.StatusCode.OK
        assert await info_over(server, client(new)) == grpc.StatusCode.UNAVAILABLE
        assert await info_over(server, grpc.ssl_channel_credentials(server_side.ca_pem)) == grpc.StatusCode.UNAVAILABLE
        authorities.write_bytes(new.ca_pem)
        assert await info_over(server, client(new)) == grpc.StatusCode.OK
        assert await info_over(server, client(old)) == grpc.StatusCode.UNAVAILABLE
