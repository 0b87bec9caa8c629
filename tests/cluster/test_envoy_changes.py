"""A real Envoy while replicas are added, removed and killed, and sessions move between releases."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cluster.envoy_process import EnvoyProcess
from cluster.fleet import (
    Fleet,
    Replica,
    ReplicaState,
    rolled_back,
    switched,
    with_release,
    with_replica,
    with_weights,
)
from specdec.client.client import Client
from specdec.client.connection import CallError, RetryPolicy
from specdec.core.types import StoppingParams
from tests.cluster.calls import Outcomes, call, calls, release_of
from tests.cluster.envoy_fleet import MODEL, EnvoyFleet, cluster_config, envoy_fleet, envoy_program, without
from tests.cluster.test_envoy_dialects import type_keys

pytestmark = pytest.mark.slow


@asynccontextmanager
async def under_load(fleet: EnvoyFleet, at_once: int = 8) -> AsyncIterator[Outcomes]:
    """Calls during the block."""
    outcomes, over = Outcomes(), asyncio.Event()
    work = calls(fleet.http, at_once=at_once, while_=lambda _: not over.is_set(), tokens=0, outcomes=outcomes)
    running = asyncio.create_task(work)
    try:
        yield outcomes
    finally:
        over.set()
        await running


async def refused_by_grpc(client: Client, number: int) -> list[str]:
    """Make sequential calls; returns the errors of those that failed without a message. If a stream is reset after its
    start, gRPC drops undelivered messages and reports RST_STREAM."""
    refused = []
    for turn in range(8):
        began = False
        try:
            async with aclosing(client.stream(f"{number} {turn}", stopping=StoppingParams(max_tokens=5))) as events:
                async for _ in events:
                    began = True
        except CallError as error:
            if not began and "RST_STREAM" not in str(error):
                refused.append(str(error))
    return refused


def kill(server: psutil.Process) -> None:
    """Kill all processes of a server together."""
    for process in [*server.children(recursive=True), server]:
        process.send_signal(signal.SIGKILL)


async def test_no_call_fails_while_replicas_are_added_and_removed(tmp_path: Path) -> None:
    async with (
        envoy_fleet(tmp_path, ["blue"], "scripted:20:5:4096") as fleet,
        under_load(fleet) as load,
        Client(fleet.grpc) as client,
    ):
        for generation in range(4):
            old = next(iter(fleet.servers))
            typing = asyncio.create_task(type_keys(client, fleet, 6))
            await fleet.add(f"next{generation}", target="scripted:20:5:4096")
            fleet.route(without(fleet.fleet, old))  # running calls finish, including an editor's stream
            await typing
            await fleet.end(old)
    assert (load.failed, load.lost, load.cut) == (0, {}, {})
    assert load.complete >= 100


async def test_a_killed_replica_fails_no_call_without_a_first_byte(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"] * 3, "scripted:150:50:4096") as fleet:
        load = Outcomes()
        work = calls(fleet.http, at_once=40, while_=lambda n: n < 500, tokens=0, outcomes=load)
        running = asyncio.create_task(work)
        once = RetryPolicy(attempts=1, resumes=0)  # Envoy retries what is retried here
        async with Client(fleet.grpc, retry=once) as client:
            streams = [asyncio.create_task(refused_by_grpc(client, number)) for number in range(100)]
            while load.complete < 120:
                await asyncio.sleep(0.01)
            kill(fleet.servers["r1"].frontend)
            await running
            assert [error for errors in await asyncio.gather(*streams) for error in errors] == []
    assert (load.lost, load.wrong) == ({}, 0)
    assert 0 < load.cut.total() <= 40  # running streams, which specdec's client resumes
    assert load.all == 500


async def test_a_replica_with_five_consecutive_failures_is_ejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.envoy._EJECTED_S", 3600.0)
    async with (
        envoy_fleet(tmp_path, ["blue", "blue"]) as fleet,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        await fleet.add("broken", target="scripted:0:0:64:broken")
        body, statuses = {"prompt": "a", "max_tokens": 1}, Counter[int]()
        while statuses[500] < 5:
            statuses[(await client.post(f"{fleet.http}/v1/completions", json=body)).status_code] += 1
        while "failed_outlier_check" not in await fleet.envoy.admin.ask("GET", "/clusters"):
            await asyncio.sleep(0.01)
        answers = [await client.post(f"{fleet.http}/v1/completions", json=body) for _ in range(100)]
    assert {answer.status_code for answer in answers} == {200}


@asynccontextmanager
async def unable_servers(count: int, *headers: str) -> AsyncIterator[tuple[list[int], list[bytes]]]:
    """Run servers that are healthy and answer 503 to every call; yields their ports, and the calls they received."""
    came: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                is_probe = head.startswith(b"GET /readyz")
                if not is_probe:
                    came.append(head)
                status = ["HTTP/1.1 200 OK"] if is_probe else ["HTTP/1.1 503 Service Unavailable", *headers]
                writer.write("\r\n".join([*status, "content-length: 0", "", ""]).encode())
        writer.close()

    async with AsyncExitStack() as stack:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(count)]
        for server in servers:
            stack.callback(server.close)
        yield [server.sockets[0].getsockname()[1] for server in servers], came


@pytest.mark.parametrize(("headers", "attempts"), [((), 4), (("x-envoy-ratelimited: true",), 1)])
async def test_an_answer_marked_by_a_replica_is_not_retried(
    tmp_path: Path, headers: tuple[str, ...], attempts: int
) -> None:
    config = cluster_config()
    async with unable_servers(4, *headers) as (ports, came):
        fleet = with_release(Fleet.of(config), MODEL, "blue")
        for number, port in enumerate(ports):
            replica = Replica(f"r{number}", MODEL, "blue", "127.0.0.1", port, port, "numbers", ReplicaState.READY)
            fleet = with_replica(fleet, replica)
        async with (
            EnvoyProcess(config, fleet, tmp_path / "envoy", envoy_program()) as envoy,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            for port in ports:
                await envoy.admin.wait_routable("127.0.0.1", port, 10)
            url = f"http://127.0.0.1:{config.models[0].http_port}/v1/completions"
            answer = await client.post(url, json={"prompt": "a"}, headers={"x-session-id": "s"})
    assert answer.status_code == 503
    assert "x-envoy-ratelimited" not in answer.headers
    counts = [re.search(rb"x-envoy-attempt-count: (\d+)", head) for head in came]
    assert [count and int(count[1]) for count in counts] == [*range(1, attempts + 1)]


async def test_client_errors_eject_no_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.envoy._MOST_EJECTED_PERCENT", 100)
    async with (
        envoy_fleet(tmp_path, ["blue"]) as fleet,
        grpc.aio.insecure_channel(fleet.grpc) as channel,
    ):
        for _ in range(12):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/specdec.api.v1.GenerationService/Nothing")(b"")
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_each_sessions_release_equals_the_offline_hash_and_rollback_is_fast(tmp_path: Path) -> None:
    sessions = [f"session {i} of größe" for i in range(300)]
    async with (
        envoy_fleet(tmp_path, ["blue", "green"]) as fleet,
        httpx.AsyncClient(trust_env=False) as client,
    ):

        async def release(session: str | None, name: str = "x-session-id") -> str:
            headers = {} if session is None else {name: session.encode()}
            answer = await client.get(f"{fleet.http}/readyz", headers=headers)
            assert answer.status_code == 200
            return answer.headers["x-specdec-release"]

        async def comes_to(wanted: str, session: str) -> float:
            began = time.monotonic()
            while await release(session) != wanted:
                assert time.monotonic() - began < 5
            return time.monotonic() - began

        before = fleet.fleet
        fleet.route(with_weights(before, MODEL, {"blue": 70, "green": 30}))
        shares = fleet.fleet.shares(MODEL)
        in_green = next(session for session in sessions if release_of(session, shares) == "green")
        await comes_to("green", in_green)
        found = [await release(session) for session in sessions]
        assert found == [release_of(session, shares) for session in sessions]
        assert {"blue", "green"} == set(found)
        assert await release(in_green, "x-workspace-id") == "green"
        by_grpc = [f"editor-{i}" for i in range(40)]
        async with Client(fleet.grpc) as client_by_grpc:
            for session in by_grpc:
                await client_by_grpc.generate("a", stopping=StoppingParams(max_tokens=1), session=session)
        figures = (await client.get(f"http://{fleet.envoy.admin.address}/clusters")).text
        calls = re.findall(r"\.(blue|green)\.[0-9a-f]+\.grpc\.affine::[0-9.:]+::rq_total::([0-9]+)", figures)
        wanted = Counter(release_of(session, shares) for session in by_grpc)
        assert {release: int(count) for release, count in calls} == wanted
        assert {await release(None) for _ in range(50)} == {"blue"}  # the share is zero
        fleet.route(rolled_back(fleet.fleet, MODEL))
        took = await comes_to("blue", in_green)
        print(f"rolled back in {1e3 * took:.0f} ms")
        assert {await release(session) for session in sessions} == {"blue"}
        fleet.route(switched(fleet.fleet, MODEL, "green"))
        await comes_to("green", sessions[0])
        assert {await release(session) for session in [None, *sessions]} == {"green"}


async def test_the_share_of_a_release_without_replicas_goes_to_the_other(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue", "green"]) as fleet:
        fleet.route(with_weights(fleet.fleet, MODEL, {"blue": 50, "green": 50}))
        async with under_load(fleet, 4) as load:
            fleet.route(without(fleet.fleet, "r1"))
            await asyncio.sleep(0.3)  # the calls show what Envoy has loaded by then; they must not fail either way
            await fleet.end("r1")
    assert (load.failed, load.lost, load.cut) == (0, {}, {})


async def test_envoy_is_restarted_when_it_dies(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"]) as fleet, httpx.AsyncClient(trust_env=False) as client:
        former = fleet.envoy.pid
        os.kill(former, signal.SIGKILL)
        async with asyncio.timeout(20):
            while (second := fleet.envoy.pid) == former:
                await asyncio.sleep(0.05)
            while True:
                try:
                    assert (await client.get(f"{fleet.http}/readyz")).status_code == 200
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        assert fleet.envoy.pid == second


async def listens(port: int | None) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


async def test_a_drain_accepts_no_connection_and_finishes_running_calls(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ("blue",), "scripted:5:400:4096") as fleet:
        load = Outcomes()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            running = asyncio.create_task(call(client, fleet.http, 11, load))
            while not (await fleet.loads())["r0"]["loads"][0]["num_running_reqs"]:
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(fleet.envoy.stop(60))
            while await listens(fleet.config.models[0].http_port):
                await asyncio.sleep(0.05)
            assert not stopping.done()
            await running
            await stopping
        assert (load.complete, load.failed) == (1, 0)
