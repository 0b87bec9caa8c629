"""What operators may do, and its cost for other callers."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2

from server.errors import DrainingError
from specdec.api.v1 import admin_pb2 as admin
from specdec.api.v1 import model_pb2
from specdec.config import Config
from specdec.errors import EngineDeadError
from tests.fake_engine import FLUSHED
from tests.server.auth.key_files import make_key
from tests.server.harness import failed, make_config, refused, rich, stream_request
from tests.server.secure_harness import SecureServer, secure_server


def with_draft(draft: str | None) -> Config:
    config = make_config()
    return config.model_copy(update={"engine": config.engine.model_copy(update={"draft": draft})})


@asynccontextmanager
async def administered(
    tmp_path: Path, draft: str | None = None, **rest: Any
) -> AsyncIterator[tuple[SecureServer, Any]]:
    """A server and an administrator's stubs."""
    path = tmp_path / "keys.yaml"
    key = make_key(path, "boss", "ops", admin=True)
    config = with_draft(draft)
    config = config.model_copy(update={"server": config.server.model_copy(update={"keys_file": path})})
    async with secure_server(config, **rest) as server, server.stubs(key) as stubs:
        yield server, stubs


async def draft_of(stubs: Any) -> str | None:
    info = await stubs.models.GetServerInfo(model_pb2.GetServerInfoRequest())
    return info.draft if info.HasField("draft") else None


async def test_only_admin_keys_are_authorized(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "user")
    calls = (
        ("Drain", admin.DrainRequest()), ("FlushCache", admin.FlushCacheRequest()),
        ("SwapDraft", admin.SwapDraftRequest()),
    )  # fmt: skip
    async with secure_server(keys_file=path) as server, server.stubs(key) as stubs:
        for method, request in calls:
            error = await failed(getattr(stubs.admin, method)(request))
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
            assert rich(error)[ErrorInfo].reason == "PERMISSION_DENIED"
        with server.model.gate.enter():
            pass  # it does not drain
    async with secure_server() as server, server.stubs() as stubs:  # without keys no caller is an operator
        for method, request in calls:
            assert (await failed(getattr(stubs.admin, method)(request))).code() == grpc.StatusCode.PERMISSION_DENIED


async def test_drain_waits_for_running_calls(tmp_path: Path) -> None:
    async with administered(tmp_path) as (server, stubs):
        running = stubs.generation.GenerateStream(stream_request("x" * 8, salt="slow"))
        await anext(aiter(running))
        short = await stubs.admin.Drain(admin.DrainRequest(timeout_s=0.05))
        assert short.running == 1
        status = await stubs.health.Check(health_pb2.HealthCheckRequest(service=""))
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await refused(stubs.generation.GenerateStream(stream_request("hello")))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert rich(error)[ErrorInfo].reason == "DRAINING"
        assert rich(error)[RetryInfo].retry_delay.ToTimedelta().total_seconds() > 0
        draining = asyncio.ensure_future(stubs.admin.Drain(admin.DrainRequest()))
        assert [m async for m in running][-1].WhichOneof("event") == "finished"
        assert (await draining).running == 0
        with pytest.raises(DrainingError), server.model.gate.enter():
            pass
        for bad in (-1.0, math.nan, math.inf):
            error = await failed(stubs.admin.Drain(admin.DrainRequest(timeout_s=bad)))
            assert rich(error)[BadRequest].field_violations[0].field == "timeout_s"


async def test_flush_reports_the_freed_pages(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, stubs):
        assert (await stubs.admin.FlushCache(admin.FlushCacheRequest())).pages == FLUSHED


async def test_a_draft_is_swapped_and_removed(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, stubs):
        assert await draft_of(stubs) is None
        answer = await stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="small", dtype="int4"))
        assert (answer.draft, list(answer.drafters)) == ("small-int4", ["suffix", "model"])
        assert await draft_of(stubs) == "small-int4"
        request = stream_request("hello")
        request.speculation.drafters.append("model")
        assert [m async for m in stubs.generation.GenerateStream(request)]
        answer = await stubs.admin.SwapDraft(admin.SwapDraftRequest())
        assert (answer.HasField("draft"), list(answer.drafters)) == (False, ["suffix"])
        error = await refused(stubs.generation.GenerateStream(request))  # it is not loaded any more
        assert rich(error)[BadRequest].field_violations[0].field == "speculation.drafters"


async def test_a_head_is_swapped_beside_the_draft_also_for_a_restart(tmp_path: Path) -> None:
    async with administered(tmp_path, "old") as (server, stubs):
        answer = await stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="a-head"))
        assert (answer.draft, list(answer.drafters)) == ("old", ["suffix", "model"])
        config = server.client.engine.config
        assert (config.draft, config.draft_head) == ("old", "a-head")


async def test_a_failed_swap_keeps_the_old_draft(tmp_path: Path) -> None:
    async with administered(tmp_path, "old") as (server, stubs):
        running = stubs.generation.GenerateStream(stream_request("x" * 12, salt="slow"))
        for draft, code, reason in (
            ("missing", grpc.StatusCode.FAILED_PRECONDITION, "DRAFT_NOT_SWAPPED"),
            ("unfit", grpc.StatusCode.FAILED_PRECONDITION, "DRAFT_NOT_SWAPPED"),
            ("broken", grpc.StatusCode.INTERNAL, "INTERNAL"),
        ):
            error = await failed(stubs.admin.SwapDraft(admin.SwapDraftRequest(draft=draft)))
            assert (error.code(), rich(error)[ErrorInfo].reason) == (code, reason)
            assert "secret" not in str(error.details())
            assert await draft_of(stubs) == "old"
        assert "cannot be found" in str(
            (await failed(stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="missing")))).details()
        )
        for bad in (admin.SwapDraftRequest(draft="x", dtype="int2"), admin.SwapDraftRequest(dtype="int8")):
            error = await failed(stubs.admin.SwapDraft(bad))
            assert rich(error)[BadRequest].field_violations[0].field == "dtype"
        assert [m async for m in running][-1].WhichOneof("event") == "finished"
        assert server.client.engine.restarts == 0


async def test_requests_are_served_while_a_draft_is_loaded(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, stubs):
        swapping = asyncio.ensure_future(stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="slow")))
        await asyncio.sleep(0.1)
        messages = [m async for m in stubs.generation.GenerateStream(stream_request("hello"))]
        assert messages[-1].WhichOneof("event") == "finished"
        assert not swapping.done()
        error = await failed(stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="small")))
        assert (error.code(), rich(error)[ErrorInfo].reason) == (grpc.StatusCode.UNAVAILABLE, "SWAP_UNDER_WAY")
        assert rich(error)[RetryInfo].retry_delay.ToTimedelta().total_seconds() > 0
        assert (await swapping).draft == "slow"


async def test_a_swap_continues_after_its_caller_disconnects(tmp_path: Path) -> None:
    async with administered(tmp_path) as (server, stubs):
        call = stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="slow"), timeout=0.1)
        assert (await failed(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(5):
            while await draft_of(stubs) != "slow":
                await asyncio.sleep(0.02)
        assert server.client.engine.restarts == 0


async def test_a_restarted_engine_has_the_new_draft(tmp_path: Path) -> None:
    async with administered(tmp_path, "old") as (server, stubs):
        await stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="new"))
        swapping = asyncio.ensure_future(stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="slow")))
        await asyncio.sleep(0.1)
        assert server.client.engine.pid is not None
        os.kill(server.client.engine.pid, signal.SIGKILL)
        error = await failed(swapping)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        await server.client.engine.wait_ready()
        assert (server.client.engine.restarts, await draft_of(stubs)) == (1, "new")
        await stubs.admin.SwapDraft(admin.SwapDraftRequest())
        os.kill(server.client.engine.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while server.client.engine.restarts < 2:
                await asyncio.sleep(0.01)
            await server.client.engine.wait_ready()
        assert await draft_of(stubs) is None


async def test_a_swap_whose_caller_leaves_is_completed(tmp_path: Path) -> None:
    async with administered(tmp_path, "old") as (server, stubs):
        swapping = asyncio.create_task(server.client.swap_draft("slow"))
        await asyncio.sleep(0.1)
        swapping.cancel()
        async with asyncio.timeout(10):
            while server.client.draft_setting != ("slow", None):
                await asyncio.sleep(0.01)
        assert await draft_of(stubs) == "slow"


async def test_bug_a_swap_that_fails_after_its_caller_left_is_no_unretrieved_error(tmp_path: Path) -> None:
    """The log got a traceback, also if a live experiment had begun the swap when the server ended."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with administered(tmp_path) as (server, _):
        swapping = asyncio.create_task(server.client.swap_draft("slow"))
        await asyncio.sleep(0)
        swapping.cancel()
        await asyncio.wait([swapping])
    assert swapping.cancelled()
    del swapping  # its traceback would keep the swap
    gc.collect()
    assert not reported


async def test_a_draft_that_is_gone_does_not_keep_the_engine_from_a_restart(tmp_path: Path) -> None:
    async with administered(tmp_path, "old") as (server, stubs):
        await stubs.admin.SwapDraft(admin.SwapDraftRequest(draft="gone"))
        assert server.client.engine.pid is not None
        os.kill(server.client.engine.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while server.client.engine.restarts < 2:
                await asyncio.sleep(0.01)
            await server.client.engine.wait_ready()
        assert await draft_of(stubs) == "old"
        assert server.client.draft_setting == ("old", None)


async def test_while_the_engine_is_not_ready(tmp_path: Path) -> None:
    async with administered(tmp_path, wait=False) as (server, stubs):
        error = await failed(stubs.admin.FlushCache(admin.FlushCacheRequest()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(EngineDeadError):
            await server.client.swap_draft(None)
