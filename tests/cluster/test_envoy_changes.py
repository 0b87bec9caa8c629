"""A real Envoy while the fleet changes: replicas come, go and die; sessions are split, moved and moved back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cluster.fleet import release_of, rolled_back, switched, with_weights
from specdec.client.client import Client
from specdec.client.connection import CallError, RetryPolicy
from specdec.core.types import StoppingParams
from tests.cluster.envoy_fleet import MODEL, EnvoyFleet, envoy_fleet, without
from tests.cluster.test_envoy_dialects import type_keys
from tests.fake_engine import answer_to

pytestmark = pytest.mark.slow


@dataclass
class Load:
    """What came of calls: ``refused`` had no byte, ``cut`` had some, ``wrong`` was another text than the script's."""

    whole: int = 0
    refused: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def ask(self, client: httpx.AsyncClient, url: str, number: int) -> None:
        """One streamed call, of a session of its own or of none; lengths differ, or all would end together."""
        prompt, tokens, text, began = f"prompt {number}", 2 + 7 * number % 13, "", False
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
        headers = {"x-session-id": f"session-{number}"} if number % 3 else {}
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    self.refused.append(f"{number}: {answer.status_code} {(await answer.aread())[:200]!r}")
                    return
                async for line in answer.aiter_lines():
                    began = True
                    if '"text":"' in line:
                        text += line.partition('"text":"')[2].partition('"')[0]
                    if line == "data: [DONE]":
                        break
                else:
                    self.cut.append(f"{number}: the stream ended early")
                    return
        except httpx.HTTPError as error:
            (self.cut if began else self.refused).append(f"{number}: {error!r}")
            return
        if text != bytes(answer_to([2, *prompt.encode()], tokens)).decode():
            self.wrong.append(f"{number}: {text!r}")
        self.whole += 1

    async def run(self, url: str, first: int, count: int, at_once: int) -> None:
        """``count`` calls, so many at a time."""
        numbers = iter(range(first, first + count))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=30, limits=limits) as client:

            async def one_after_the_other() -> None:
                for number in numbers:
                    await self.ask(client, url, number)

            await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))


@asynccontextmanager
async def under_load(fleet: EnvoyFleet, at_once: int = 8) -> AsyncIterator[Load]:
    """Calls go on for as long as the block takes."""
    load, over = Load(), asyncio.Event()

    async def go_on() -> None:
        first = 0
        while not over.is_set():
            await load.run(fleet.http, first, 4 * at_once, at_once)
            first += 4 * at_once

    running = asyncio.create_task(go_on())
    try:
        yield load
    finally:
        over.set()
        await running


async def refused_by_grpc(client: Client, number: int) -> list[str]:
    """Calls one after the other; what was said of those that failed without a byte. Where a stream is reset that has
    begun, gRPC's library drops what it had not handed over yet: it says RST_STREAM of calls that seem to have none."""
    refused = []
    for call in range(8):
        began = False
        try:
            async with aclosing(client.stream(f"{number} {call}", stopping=StoppingParams(max_tokens=5))) as events:
                async for _ in events:
                    began = True
        except CallError as error:
            if not began and "RST_STREAM" not in str(error):
                refused.append(str(error))
    return refused


def kill(server: psutil.Process) -> None:
    """All of a server at once, as when its machine is gone."""
    for process in [*server.children(recursive=True), server]:
        process.send_signal(signal.SIGKILL)


async def test_replicas_come_and_go_and_no_call_fails(tmp_path: Path) -> None:
    async with (
        envoy_fleet(tmp_path, ["blue"], "scripted:20:5:4096") as fleet,
        under_load(fleet) as load,
        Client(fleet.grpc) as client,
    ):
        for generation in range(4):
            old = next(iter(fleet.servers))
            typing = asyncio.create_task(type_keys(client, fleet, 6))
            await fleet.add(f"next{generation}", target="scripted:20:5:4096")
            fleet.route(without(fleet.fleet, old))  # what it has is finished, an editor's stream too
            await typing
            await fleet.servers.pop(old).stop()
    assert (load.refused, load.cut, load.wrong) == ([], [], [])
    assert load.whole >= 100


async def test_a_killed_replica_takes_no_call_with_it_that_had_no_byte(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"] * 3, "scripted:150:50:4096") as fleet:
        load = Load()
        running = asyncio.create_task(load.run(fleet.http, 0, 500, 40))
        once = RetryPolicy(attempts=1, resumes=0)  # what is tried again here, Envoy tries
        async with Client(fleet.grpc, retry=once) as client:
            streams = [asyncio.create_task(refused_by_grpc(client, number)) for number in range(100)]
            while load.whole < 120:
                await asyncio.sleep(0.01)
            kill(fleet.servers["r1"].frontend)
            await running
            assert [error for errors in await asyncio.gather(*streams) for error in errors] == []
    assert (load.refused, load.wrong) == ([], [])
    assert 0 < len(load.cut) <= 40  # those that had begun, which a client takes up again elsewhere
    assert load.whole + len(load.cut) == 500


async def test_a_replica_that_fails_five_times_in_a_row_is_left_alone(tmp_path: Path) -> None:
    health = {"ejected_s": 30.0}
    async with envoy_fleet(tmp_path, ["blue", "blue"], health=health) as fleet:
        await fleet.add("broken", target="scripted:0:0:64:broken")
        body = {"prompt": "a", "max_tokens": 1}
        async with httpx.AsyncClient(trust_env=False) as client:
            answers = [await client.post(f"{fleet.http}/v1/completions", json=body) for _ in range(200)]
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(500) >= 5
    assert statuses[100:] == [200] * 100


async def test_what_calls_bring_upon_themselves_speaks_against_no_replica(tmp_path: Path) -> None:
    async with (
        envoy_fleet(tmp_path, ["blue"], health={"max_ejected_percent": 100}) as fleet,
        grpc.aio.insecure_channel(fleet.grpc) as channel,
    ):
        for _ in range(12):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/specdec.api.v1.GenerationService/Nothing")(b"")
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_each_sessions_release_is_the_one_computed_offline_and_the_way_back_is_short(tmp_path: Path) -> None:
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
        assert {await release(None) for _ in range(50)} == {"blue"}  # nobody is drawn
        fleet.route(rolled_back(fleet.fleet, MODEL))
        took = await comes_to("blue", in_green)
        print(f"rolled back in {1e3 * took:.0f} ms")
        assert {await release(session) for session in sessions} == {"blue"}
        fleet.route(switched(fleet.fleet, MODEL, "green"))
        await comes_to("green", sessions[0])
        assert {await release(session) for session in [None, *sessions]} == {"green"}


async def test_the_share_of_a_release_without_replicas_is_served_by_the_other(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue", "green"]) as fleet:
        fleet.route(with_weights(fleet.fleet, MODEL, {"blue": 50, "green": 50}))
        async with under_load(fleet, 4) as load:
            fleet.route(without(fleet.fleet, "r1"))
            await asyncio.sleep(0.3)  # what Envoy has read by then is seen in the calls, which must not fail either way
            await fleet.servers.pop("r1").stop()
    assert (load.refused, load.cut, load.wrong) == ([], [], [])


async def test_envoy_is_started_again_when_it_dies(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"]) as fleet, httpx.AsyncClient(trust_env=False) as client:
        os.kill(fleet.envoy.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while fleet.envoy.starts < 2:
                await asyncio.sleep(0.05)
            while True:
                try:
                    assert (await client.get(f"{fleet.http}/readyz")).status_code == 200
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        assert fleet.envoy.starts == 2


async def listens(port: int | None) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


async def test_before_it_ends_it_takes_no_new_connection_and_finishes_the_calls_that_run(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ("blue",), "scripted:5:400:4096") as fleet:
        load = Load()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            running = asyncio.create_task(load.ask(client, fleet.http, 11))
            while not (await fleet.loads())["r0"]["loads"][0]["num_running_reqs"]:
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(fleet.envoy.stop(60))
            while await listens(fleet.config.models[0].http_port):
                await asyncio.sleep(0.05)
            assert not stopping.done()
            await running
            await stopping
        assert (load.whole, load.refused, load.cut, load.wrong) == (1, [], [], [])
