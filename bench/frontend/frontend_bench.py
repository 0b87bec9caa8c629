"""Added time to the first token, cost per message, and share of the processor, for each face of the server."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

from bench.child_server import ChildServer
from bench.frontend.bare_grpc import BareGrpc
from bench.frontend.bare_http import BareHttp
from bench.frontend.paced_engine import TOKENS, paced_target
from bench.frontend.readers import GrpcReader, HttpReader
from bench.frontend.stamp import now_ns, read_stamps
from bench.local_server import LocalServer
from bench.serve.spread import spread
from specdec.config import Config, EngineConfig, ServerConfig

FACTORY, TOKENIZER = "bench.frontend.paced_engine:build", "bench.frontend.byte_tokenizer:ByteTokenizer"
PROMPT = "def f(x):\n    " * 16
FACES = ("grpc", "http")
Reader = GrpcReader | HttpReader
BareReader = BareGrpc | BareHttp


@dataclass(frozen=True, slots=True)
class FrontendPlan:
    """``requests`` of ``messages`` each, one stream at a time, ``step_ms`` between messages; then ``streams`` at once
    for ``seconds``, with steps of ``busy_step_ms``."""

    requests: int = 60
    messages: int = 60
    step_ms: float = 4.0
    streams: int = 64
    busy_step_ms: float = 50.0
    seconds: float = 10.0
    faces: tuple[str, ...] = FACES


@dataclass(slots=True)
class _Heard:
    """Nanoseconds: of a request's first message what the engine did not take; of every message its way."""

    sent_ns: int
    added_ns: int = 0
    ways_ns: list[int] = field(default_factory=list)

    def take(self, at_ns: int, text: str) -> None:
        """The next message came."""
        stamps = read_stamps(text)
        if not self.ways_ns:
            self.added_ns = (at_ns - self.sent_ns) - (stamps[1] - stamps[0])
        self.ways_ns.append(at_ns - stamps[-1])


async def measure_frontend(plan: FrontendPlan) -> dict[str, Any]:
    """JSON-able figures by face; see `_alone` and `_busy` for what each means."""
    figures: dict[str, Any] = {}
    for face in plan.faces:
        async with _server(plan.step_ms) as server:
            figures[face] = await _alone(plan, server, face)
        async with _server(plan.busy_step_ms) as server:
            figures[face] |= await _busy(plan, server, face)
    return figures


async def _alone(plan: FrontendPlan, server: LocalServer, face: str) -> dict[str, Any]:
    """One stream: TTFT without the engine's part; from the engine's step to the client's hands; front end's CPU time
    per message, its share of a request's beginning and end included. By a client that costs hardly anything; what a
    library's client sees is told beside that, and what the libraries under our faces take with nothing behind them."""
    found = await _by_bare_client(plan, server, face)
    idle_s = await _idle_cost(server)
    reader = _reader(server, face)
    by_library = [await _hear(reader, plan.messages) for _ in range(max(4, plan.requests // 2))]
    await reader.close()
    async with ChildServer("bench.frontend.floor_process", str(plan.step_ms)) as floor:
        least = await _by_bare_client(plan, floor, face)
    return {
        **found,
        **{f"floor_{name}": figure for name, figure in least.items()},
        "library_added_ttft_ms": spread([one.added_ns / 1e6 for one in by_library]),
        "library_message_way_ms": spread([way / 1e6 for one in by_library for way in one.ways_ns]),
        "idle_cpu_share_of_a_core": round(idle_s, 4),
        "messages": plan.requests * plan.messages,
    }


async def _by_bare_client(plan: FrontendPlan, server: ChildServer, face: str) -> dict[str, Any]:
    bare = BareGrpc(server.grpc_port) if face == "grpc" else BareHttp(server.http_port)
    await asyncio.to_thread(_hear_bare, bare, max(2, plan.requests // 10), plan.messages)
    began_s = server.cpu_s()
    heard = await asyncio.to_thread(_hear_bare, bare, plan.requests, plan.messages)
    spent_s = server.cpu_s() - began_s
    bare.close()
    ways_ns = [way for one in heard for way in one.ways_ns]
    return {
        "added_ttft_ms": spread([one.added_ns / 1e6 for one in heard]),
        "message_way_ms": spread([way / 1e6 for way in ways_ns]),
        "cpu_ms_per_message": round(spent_s * 1e3 / len(ways_ns), 4),
    }


async def _busy(plan: FrontendPlan, server: LocalServer, face: str) -> dict[str, Any]:
    """Many streams: the front end's share of all cores, between the first second and the last."""
    reader = _reader(server, face)
    per_stream = max(2, int(plan.seconds * 1e3 / plan.busy_step_ms))
    streams = [asyncio.create_task(_hear(reader, per_stream)) for _ in range(plan.streams)]
    margin = plan.seconds * 0.1
    await asyncio.sleep(margin)
    began_s, ours_s, at_s = server.cpu_s(), time.process_time(), time.monotonic()
    await asyncio.sleep(plan.seconds - 2 * margin)
    spent_s, we_s, wall_s = server.cpu_s() - began_s, time.process_time() - ours_s, time.monotonic() - at_s
    heard = await asyncio.gather(*streams)
    await reader.close()
    cores = len(os.sched_getaffinity(0))
    rate = plan.streams * 1e3 / plan.busy_step_ms
    return {
        "streams": plan.streams,
        "messages_per_s": round(rate, 1),
        "cpu_share": round(spent_s / wall_s / cores, 4),
        "client_cpu_share": round(we_s / wall_s / cores, 4),
        "busy_cpu_ms_per_message": round(spent_s * 1e3 / (rate * wall_s), 4),
        "busy_message_way_ms": spread([way / 1e6 for one in heard for way in one.ways_ns[1:]]),
        "cores": cores,
    }


async def _hear(reader: Reader, messages: int) -> _Heard:
    heard = _Heard(now_ns())
    async for at_ns, text in reader.read(PROMPT, messages * TOKENS):
        heard.take(at_ns, text)
    return heard


def _hear_bare(reader: BareReader, requests: int, messages: int) -> list[_Heard]:
    found = []
    for _ in range(requests):
        heard = _Heard(now_ns())
        for at_ns, text in reader.read(PROMPT, messages * TOKENS):
            heard.take(at_ns, text)
        found.append(heard)
    return found


async def _idle_cost(server: LocalServer, seconds: float = 1.0) -> float:
    began_s = server.cpu_s()
    await asyncio.sleep(seconds)
    return (server.cpu_s() - began_s) / seconds


def _server(step_ms: float) -> LocalServer:
    config = Config(engine=EngineConfig(target=paced_target(step_ms)), server=ServerConfig(grpc_port=0, http_port=0))
    return LocalServer(config, factory=FACTORY, tokenizer=TOKENIZER)


def _reader(server: LocalServer, face: str) -> Reader:
    return GrpcReader(server.grpc_address) if face == "grpc" else HttpReader(server.http_port)
