"""Measure what the front end adds to the engine: time to first token, cost per message, share of the CPU."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import orjson

from bench.frontend.paced_engine import TOKENS, now_ns, paced_target, read_stamps
from bench.local_server import LocalServer
from specdec.api.v1 import generation_pb2, generation_pb2_grpc
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.control_groups import usable_cores
from specdec.errors import SpecdecError
from specdec.load.figures import spread

Message = tuple[int, str]  # when it was read, in nanoseconds, and its text
_PREFIX = b"data: "
_DATA = _PREFIX + b"{"  # of a line with a message; the last line has no object


class ReaderError(SpecdecError):
    """The server under measurement did not answer as it should."""


class HttpReader:
    """A client of POST /v1/completions over one connection, without an event loop."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()

    def read(self, prompt: str, max_tokens: int) -> Iterator[Message]:
        """Sends a request and yields the messages with text.

        Raises:
            ReaderError: the status is not 200, or the answer is incomplete.
        """
        body = orjson.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
        try:
            self._connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = self._connection.getresponse()
            if response.status != 200:
                raise ReaderError(f"HTTP {response.status}")
            while line := response.readline():
                at_ns = now_ns()
                if line.startswith(_DATA) and (text := orjson.loads(line.removeprefix(_PREFIX))["choices"][0]["text"]):
                    yield at_ns, str(text)
        except (OSError, http.client.HTTPException) as error:
            raise ReaderError(f"the answer is incomplete: {error!r}") from None

    def close(self) -> None:
        self._connection.close()


class GrpcReader:
    """A client of GenerateStream over one connection. Blocking calls: an event loop would cost more."""

    def __init__(self, port: int) -> None:
        # By default gRPC shares a connection between the channels to one server.
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        self._generate = generation_pb2_grpc.GenerationServiceStub(self._channel).GenerateStream

    def read(self, prompt: str, max_tokens: int) -> Iterator[Message]:
        """Sends a request and yields the messages with text.

        Raises:
            ReaderError: the call failed.
        """
        request = generation_pb2.GenerateStreamRequest(text=prompt)
        request.stopping.max_tokens = max_tokens
        try:
            for message in self._generate(request, timeout=60 + max_tokens):  # a server that hangs ends the benchmark
                at_ns = now_ns()
                if message.delta.text:
                    yield at_ns, message.delta.text
        except grpc.RpcError as error:
            raise ReaderError(f"the call failed: {error.code().name}: {error.details()}") from None

    def close(self) -> None:
        self._channel.close()


FACTORY, TOKENIZER = "bench.frontend.paced_engine:build", "bench.frontend.paced_engine:ByteTokenizer"
PROMPT = "def f(x):\n    " * 16
PROTOCOLS = ("grpc", "http")
Reader = GrpcReader | HttpReader


@dataclass(frozen=True, slots=True)
class FrontendPlan:
    """Two parts: one stream at a time, then many streams at once."""

    requests: int = 60  # of the first part
    messages: int = 60  # of each of these requests
    step_ms: float = 4.0  # between two messages of the first part
    streams: int = 64  # of the second part, each over its own connection
    busy_step_ms: float = 50.0  # between two messages of a stream in the second part
    seconds: float = 10.0  # duration of the second part
    protocols: tuple[str, ...] = PROTOCOLS


class _Timing(NamedTuple):
    """Times of one request, in nanoseconds."""

    added_ns: int  # time to the first message, without the engine's share
    ways_ns: list[int]  # from the engine's step to the client, per message


async def measure_frontend(plan: FrontendPlan) -> dict[str, Any]:
    """JSON-able figures by protocol.

    One stream: the added time to the first token, the time of a message from engine to client, and the front end's CPU
    time per message, which includes begin and end of a request. Many streams: the front end's share of all cores.
    """
    figures: dict[str, Any] = {}
    for protocol in plan.protocols:
        async with _server(plan.step_ms) as server:
            found = await _one_stream(plan, server, protocol)
        async with _server(plan.busy_step_ms) as server:
            busy = await _many_streams(plan, server, protocol)
        figures[protocol] = found | busy
    return figures


async def _one_stream(plan: FrontendPlan, server: LocalServer, protocol: str) -> dict[str, Any]:
    reader = _reader(server, protocol)
    await asyncio.to_thread(_read, reader, max(2, plan.requests // 10), plan.messages)
    began_s = server.cpu_s()
    timings = await asyncio.to_thread(_read, reader, plan.requests, plan.messages)
    spent_s = server.cpu_s() - began_s
    reader.close()
    ways_ns = [way for one in timings for way in one.ways_ns]
    return {
        "added_ttft_ms": spread([one.added_ns / 1e6 for one in timings]),
        "message_way_ms": spread([way / 1e6 for way in ways_ns]),
        "cpu_ms_per_message": round(spent_s * 1e3 / len(ways_ns), 4),
    }


async def _many_streams(plan: FrontendPlan, server: LocalServer, protocol: str) -> dict[str, Any]:
    """Measures between the first and the last tenth of the time, while every stream runs."""
    per_stream = max(2, int(plan.seconds * 1e3 / plan.busy_step_ms))
    readers = [_reader(server, protocol) for _ in range(plan.streams)]
    with ThreadPoolExecutor(plan.streams) as pool:
        loop = asyncio.get_running_loop()
        streams = [loop.run_in_executor(pool, _read, reader, 1, per_stream) for reader in readers]
        margin_s = plan.seconds * 0.1
        await asyncio.sleep(margin_s)
        began_s, client_s, at_s = server.cpu_s(), time.process_time(), time.monotonic()
        await asyncio.sleep(plan.seconds - 2 * margin_s)
        wall_s = time.monotonic() - at_s
        spent_s, client_s = server.cpu_s() - began_s, time.process_time() - client_s
        timings = await asyncio.gather(*streams)
    for reader in readers:
        reader.close()
    cores = usable_cores()
    rate = plan.streams * 1e3 / plan.busy_step_ms
    return {
        "streams": plan.streams,
        "messages_per_s": round(rate, 1),
        "cpu_share": round(spent_s / wall_s / cores, 4),
        "client_cpu_share": round(client_s / wall_s / cores, 4),
        "busy_cpu_ms_per_message": round(spent_s * 1e3 / (rate * wall_s), 4),
        "busy_message_way_ms": spread([way / 1e6 for (one,) in timings for way in one.ways_ns[1:]]),
        "cores": cores,
    }


def _read(reader: Reader, requests: int, messages: int) -> list[_Timing]:
    found = []
    for _ in range(requests):
        sent_ns = now_ns()
        heard = [(at_ns, read_stamps(text)) for at_ns, text in reader.read(PROMPT, messages * TOKENS)]
        first_ns, (arrived_ns, left_ns) = heard[0]
        ways_ns = [at_ns - stamps_ns[-1] for at_ns, stamps_ns in heard]
        found.append(_Timing(first_ns - sent_ns - (left_ns - arrived_ns), ways_ns))
    return found


def _server(step_ms: float) -> LocalServer:
    config = Config(engine=EngineConfig(target=paced_target(step_ms)), server=ServerConfig(grpc_port=0, http_port=0))
    return LocalServer(config, factory=FACTORY, tokenizer=TOKENIZER)


def _reader(server: LocalServer, protocol: str) -> Reader:
    return GrpcReader(server.grpc_port) if protocol == "grpc" else HttpReader(server.http_port)
