"""What others notice of an attack: two streams and `/livez`, observed from a separate process."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import httpx

from specdec.api.v1 import generation_pb2

STREAMS = 2
_LIVEZ_EVERY_S = 0.02
_STREAM_TOKENS = 1000
_METHOD = "/specdec.api.v1.GenerationService/GenerateStream"


@dataclass(frozen=True, slots=True)
class Wait:
    """One gap between two tokens, or one answer of `/livez`. Times are of `time.monotonic`."""

    began_s: float
    ended_s: float

    @property
    def ms(self) -> float:
        return 1e3 * (self.ended_s - self.began_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """Waits during an attack, in milliseconds."""

    gap_p50: float
    gap_p99: float
    gap_max: float
    livez_p99: float


class Observations:
    """Waits of the bystanders, complete when `observing` ends."""

    def __init__(self) -> None:
        self.gaps: list[Wait] = []
        self.livez: list[Wait] = []

    def during(self, *spans: tuple[float, float]) -> Figures:
        """Figures of the waits that overlap one of ``spans``, each a begin and an end."""
        gaps, livez = (
            sorted(wait.ms for wait in waits if any(wait.ended_s > b and wait.began_s < e for b, e in spans))
            for waits in (self.gaps, self.livez)
        )
        return Figures(_quantile(gaps, 0.5), _quantile(gaps, 0.99), gaps[-1], _quantile(livez, 0.99))


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[int(part * (len(ordered) - 1))]


@contextmanager
def observing(grpc_port: int, http_port: int, key: str = "") -> Iterator[Observations]:
    """Generate, and poll `/livez` meanwhile."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_observe, args=(grpc_port, http_port, key, theirs), daemon=True)
    process.start()
    found = Observations()
    try:
        assert ours.recv() == "streaming"
        yield found
    finally:
        ours.send("stop")
        gaps, livez = ours.recv()
        process.join()
        found.gaps, found.livez = [Wait(*wait) for wait in gaps], [Wait(*wait) for wait in livez]


def _observe(grpc_port: int, http_port: int, key: str, link: Connection) -> None:
    asyncio.run(_observe_until_stopped(grpc_port, http_port, key, link))


async def _observe_until_stopped(grpc_port: int, http_port: int, key: str, link: Connection) -> None:
    gaps: list[tuple[float, float]] = []
    livez: list[tuple[float, float]] = []
    streaming = asyncio.Event()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        tasks = [asyncio.create_task(_stream(channel, key, number, gaps, streaming)) for number in range(STREAMS)]
        tasks.append(asyncio.create_task(_ask_livez(http_port, livez)))
        await streaming.wait()
        link.send("streaming")
        await asyncio.to_thread(link.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    link.send((gaps, livez))


async def _stream(
    channel: grpc.aio.Channel, key: str, number: int, gaps: list[tuple[float, float]], streaming: asyncio.Event
) -> None:
    call: Any = channel.unary_stream(
        _METHOD,
        request_serializer=generation_pb2.GenerateStreamRequest.SerializeToString,
        response_deserializer=generation_pb2.GenerateStreamResponse.FromString,
    )
    request = generation_pb2.GenerateStreamRequest(
        text=f"Story {number}: once upon a time", sampling={"temperature": 0.8, "seed": number},
        stopping={"max_tokens": _STREAM_TOKENS, "ignore_eos": True},
        # A step of many drafted tokens is long, and not because of an attack.
        speculation={"mode": "MODE_OFF"},
    )  # fmt: skip
    while True:
        last_s = time.monotonic()
        async for message in call(request, metadata=[("authorization", f"Bearer {key}")]):
            if message.WhichOneof("event") == "delta":
                now_s = time.monotonic()
                gaps.append((last_s, now_s))
                last_s = now_s
                if len(gaps) > 50 * STREAMS:
                    streaming.set()


async def _ask_livez(port: int, livez: list[tuple[float, float]]) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while True:
            began_s = time.monotonic()
            await http.get("/livez")
            livez.append((began_s, time.monotonic()))
            await asyncio.sleep(_LIVEZ_EVERY_S)
