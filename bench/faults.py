"""An engine that dies or hangs under load: how its streams end, and how long the server is away."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import httpx
import psutil

from bench.local_server import LocalServer
from bench.serve.endpoints import DONE, StreamError, stream_event
from bench.soak.watch import RunningTime, SoakFault, come_to_rest
from bench.workloads.workload import long_text
from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials, RetryPolicy
from specdec.config import Config
from specdec.core.types import Finished, StoppingParams

Way = Literal["kill", "hang"]


@dataclass(frozen=True, slots=True)
class FaultsPlan:
    """Each of ``ways``, ``times`` times, with ``streams`` running over gRPC and as many over HTTP: "kill" is SIGKILL,
    "hang" is SIGSTOP, noticed by ``heartbeat_s`` seconds of silence. ``limit_s``: what it may take to serve again,
    beside the time to load the model, and that silence. ``hang_s``: a stream that has not ended by then never will.
    """

    ways: tuple[Way, ...] = ("kill", "hang")
    times: int = 2
    streams: int = 8
    max_tokens: int = 400
    heartbeat_s: float = 5.0
    limit_s: float = 5.0
    hang_s: float = 120.0


COMPLETE, UNAVAILABLE, CUT = "complete", "unavailable", "cut"
_CODE = "engine_unavailable"


async def over_grpc(client: Client, prompt: str, max_tokens: int) -> tuple[str, float]:
    """How a stream ended, and when, in the event loop's seconds."""
    ended = CUT
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    try:
        async with aclosing(client.stream(prompt, stopping=stopping)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ended = COMPLETE
    except CallError as error:
        is_retryable = error.code == grpc.StatusCode.UNAVAILABLE and error.reached and error.retry_after_s is not None
        ended = UNAVAILABLE if is_retryable else f"{error.code.name}: {error.message}"
    return ended, asyncio.get_running_loop().time()


async def over_http(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> tuple[str, float]:
    """The same over HTTP, where the stream's last event carries the error."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            data = (await response.aread()).decode()
            ended = ending_of(response.status_code, data)
    except httpx.HTTPError as error:
        ended = f"{CUT}: {type(error).__name__}"
    return ended, asyncio.get_running_loop().time()


def ending_of(status: int, data: str) -> str:
    """How a stream of OpenAI's events ended, by all that came of it."""
    if status != 200:
        return UNAVAILABLE if status == 503 else f"status {status}"
    try:
        events = [event for line in data.splitlines() if (event := stream_event(line)) is not None]
    except StreamError as broken:
        error = broken.error
        return UNAVAILABLE if error["code"] == _CODE else f"error {error['code']}: {error['message']}"
    return COMPLETE if events and events[-1] is DONE else CUT


_POLL_S = 0.02


class Comeback:
    """``old``: the process id of the engine that runs now."""

    def __init__(self, server: LocalServer, client: Client) -> None:
        self._server, self._client = server, client
        self.old = server.engine.pid

    async def wait(self, began_s: float, at: float, limit_s: float) -> tuple[float, float]:
        """Seconds that the next engine loaded, from its process's begin until requests were taken, and seconds from the
        fault until one was answered. The fault was at ``began_s`` of the event loop's clock, ``at`` of Unix time.

        Raises:
            SoakFault: no request is answered within ``limit_s`` seconds.
        """
        clock = asyncio.get_running_loop().time
        born: float | None = None
        refused_s = began_s
        while clock() < began_s + limit_s:
            born = self._born() if born is None else born
            tried_s = clock()
            try:
                await self._client.generate("a", stopping=StoppingParams(max_tokens=1))
            except CallError:
                refused_s = tried_s
            else:
                if born is not None:
                    return max(0.0, at + (refused_s - began_s) - born), clock() - began_s
            await asyncio.sleep(_POLL_S)
        raise SoakFault(f"no answer within {limit_s:g} s of the fault")

    def _born(self) -> float | None:
        """When the next engine's process was started, in Unix time; None: there is none yet."""
        try:
            engine = self._server.engine
            return engine.create_time() if engine.pid != self.old else None
        except (psutil.Error, StopIteration):
            return None


HUNG = "hung"
_PROMPT_CHARACTERS = 400
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
    """Wait until the engine works on some of the streams; the engine reports its load once a second."""
    async with asyncio.timeout(plan.hang_s):
        while (await client.load()).running_requests == 0:
            await asyncio.sleep(_POLL_S)


async def _at_rest(server: LocalServer, plan: FaultsPlan) -> bool:
    """Whether the server comes to hold nothing for the streams that were broken."""
    async with RunningTime() as clock:
        try:
            return (await come_to_rest(server, clock, 0, plan.hang_s)).at_rest
        except SoakFault:
            return False
