"""Breaks a server's engine under load, again and again, and times what follows."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from bench.faults.broken_streams import COMPLETE, UNAVAILABLE, over_grpc, over_http
from bench.faults.comeback import Comeback
from bench.faults.faults_plan import FaultsPlan, Way
from bench.local_server import LocalServer
from bench.soak.look import look
from bench.soak.soak_fault import SoakFault
from bench.texts import long_text
from specdec.client import Client, Credentials, RetryPolicy
from specdec.config import Config

HUNG = "hung"
_PROMPT_CHARACTERS = 400
_POLL_S = 0.02
_SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


async def measure_faults(
    config: Config, plan: FaultsPlan, note: Callable[[str], None], **server: str
) -> dict[str, Any]:
    """JSON-able: what became of the streams of each fault, and how long the server was away. ``server``: as
    `LocalServer` takes it.

    Raises:
        LocalServerError: the server did not start.
        SoakFault: it does not come back at all.
    """
    changes = {"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "heartbeat_timeout_s": plan.heartbeat_s}
    config = config.model_copy(update={"server": config.server.model_copy(update=changes)})
    found = []
    for way in plan.ways:
        # Each on a server of its own: one whose engine dies often waits longer before it starts it again.
        async with LocalServer(config, **server) as running:
            for number in range(plan.times):
                found.append(await _one_fault(running, plan, way))
                note(f"{way} {number + 1}: {found[-1]}")
    wrong = [line for one in found for line in wrong_with(one, plan)]
    return {"ok": not wrong, "faults": wrong, "limit_s": plan.limit_s, "runs": found}


def wrong_with(run: dict[str, Any], plan: FaultsPlan) -> list[str]:
    """What must not be: a stream that did not end, or ended as anything but whole or unavailable; a server that takes
    longer than the limit beside loading its model and, for an engine that hangs, noticing it."""
    way, allowed_s = run["way"], plan.limit_s + (plan.heartbeat_s if run["way"] == "hang" else 0.0)
    found = [
        f"{way}: {count} streams ended as {ending!r}"
        for ending, count in run["streams"].items()
        if ending not in (UNAVAILABLE, COMPLETE)
    ]
    if run["beside_load_s"] > allowed_s:
        found.append(f"{way}: {run['beside_load_s']} s away beside loading, {allowed_s:g} are allowed")
    if UNAVAILABLE not in run["streams"]:
        found.append(f"{way}: every stream was over before the fault, so nothing was tried")
    if not run["at_rest"]:
        found.append(f"{way}: something of the broken streams is still held")
    return found


async def _one_fault(server: LocalServer, plan: FaultsPlan, way: Way) -> dict[str, Any]:
    clock = asyncio.get_running_loop().time
    url, text = f"http://127.0.0.1:{server.http_port}", long_text()
    async with (
        Client(server.grpc_address, Credentials(), RetryPolicy(attempts=1)) as client,
        httpx.AsyncClient(base_url=url, timeout=None) as http,
    ):
        streams = []
        for number in range(plan.streams):
            prompt = text[number * 100 :][:_PROMPT_CHARACTERS]
            streams.append(asyncio.create_task(over_grpc(client, prompt, plan.max_tokens)))
            streams.append(asyncio.create_task(over_http(http, prompt, plan.max_tokens)))
        await _running(client, plan)
        comeback = Comeback(server, client)
        began_s, at = clock(), time.time()
        os.kill(comeback.old, _SIGNALS[way])
        returning = asyncio.create_task(comeback.wait(began_s, at, plan.heartbeat_s + plan.hang_s))
        await asyncio.wait(streams, timeout=plan.hang_s)
        endings = Counter(task.result()[0] if task.done() else HUNG for task in streams)
        ended_s = max((task.result()[1] for task in streams if task.done()), default=began_s)
        for task in streams:
            task.cancel()
        load_s, away_s = await returning
        at_rest = await _at_rest(server, plan)
    return {
        "way": way, "streams": dict(endings), "streams_ended_s": round(ended_s - began_s, 3),
        "serving_again_s": round(away_s, 3), "load_s": round(load_s, 3), "beside_load_s": round(away_s - load_s, 3),
        "at_rest": at_rest,
    }  # fmt: skip


async def _running(client: Client, plan: FaultsPlan) -> None:
    """Wait until the engine works on some of the streams; it tells its load once a second."""
    async with asyncio.timeout(plan.hang_s):
        while (await client.load()).running_requests == 0:
            await asyncio.sleep(_POLL_S)


async def _at_rest(server: LocalServer, plan: FaultsPlan) -> bool:
    """Whether the server comes to hold nothing for the streams that were broken."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + plan.hang_s
    while clock() < until_s:
        try:
            if (await look(server, 0.0, 0)).at_rest:
                return True
        except SoakFault:
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(10 * _POLL_S)
    return False
