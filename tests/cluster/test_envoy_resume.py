"""A replica behind Envoy is killed: its running streams resume on the other one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet, with_release, with_replica, without_replica
from specdec.client import Client
from tests.cluster.envoy_fleet import MODEL, cluster_config, envoy_program, replica_of, route
from tests.server.test_resuming import QUICK, TOKENS, Read, read, server, uncut

pytestmark = pytest.mark.slow

STREAMS = 24


async def test_started_streams_survive_a_kill(tmp_path: Path) -> None:
    """Each stream has its own connection, and only Envoy detects the death."""
    program, config = envoy_program(), cluster_config()
    servers = {"r0": server(drafts=True), "r1": server(drafts=False)}
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(ProcessLookupError))  # one of them is dead by then
        await asyncio.gather(*(stack.enter_async_context(each) for each in servers.values()))
        fleet = with_release(Fleet.of(config), MODEL, "blue")
        for name, each in servers.items():
            fleet = with_replica(fleet, replica_of(name, "blue", each))
        envoy = await stack.enter_async_context(EnvoyProcess(config, fleet, tmp_path / "envoy", program))
        expected = await uncut(servers["r1"].grpc_address, range(STREAMS))
        processes = [servers["r0"].frontend, *servers["r0"].frontend.children()]
        seen, killed_at, longest = 0, 0.0, 0.0
        came = [0.0] * STREAMS

        async def one(number: int) -> Read:
            def saw() -> None:
                nonlocal seen, killed_at, longest
                now, seen = time.monotonic(), seen + 1
                if came[number] and killed_at and came[number] <= killed_at:
                    longest = max(longest, now - killed_at)
                came[number] = now
                if seen == STREAMS * TOKENS // 8:
                    killed_at = time.monotonic()
                    for process in processes:
                        os.kill(process.pid, signal.SIGKILL)
                    route(envoy, without_replica(fleet, "r0"))  # as the reconciler does, half a second later

            async with Client(f"127.0.0.1:{config.models[0].grpc_port}", retry=QUICK) as client:
                return await read(client, number, saw)

        found = await asyncio.gather(*map(one, range(STREAMS)))
    resumed = sum(each.resumed for each in found)
    print(f"{resumed} samples resumed; the longest pause in a stream {longest:.2f} s")
    assert resumed >= 3
    assert [each.answers for each in found] == [each.answers for each in expected]
