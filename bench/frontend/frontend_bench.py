"""Measure what the front end adds to the engine: time to first token, cost per message, share of the CPU."""

from __future__ import annotations

import asyncio
import http.client
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import orjson

from bench.frontend.paced_engine import TOKENS, now_ns, paced_target, read_stamps
from bench.local_server import LocalServer
from specdec.api.v1 import generation_pb2 as pb
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
    """A client of POST /v1/completions over one connection, without an event loop: its own cost is negligible."""

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
        except http.client.HTTPException as error:
            raise ReaderError(f"the answer is incomplete: {error!r}") from None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


_ROOM = 1 << 16
_DATA_FRAME, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_MOST = (1 << 31) - 1
_METHOD = "/specdec.api.v1.GenerationService/GenerateStream"


class GrpcReader:
    """A minimal client of GenerateStream over one connection: its own cost is negligible."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream, self._buffer = -1, b""
        window = struct.pack(">HI", 4, _MOST)  # SETTINGS_INITIAL_WINDOW_SIZE: the server never waits for window updates
        more = struct.pack(">I", _MOST - 0xFFFF)
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, window) + _frame(_WINDOW, 0, 0, more)
        )

    def read(self, prompt: str, max_tokens: int) -> Iterator[Message]:
        """Sends a request and yields the messages with text.

        Raises:
            ReaderError: the call ends before its last message, or the server ends the connection.
        """
        request = pb.GenerateStreamRequest(text=prompt)
        request.stopping.max_tokens = max_tokens
        data = request.SerializeToString()
        self._stream += 2
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, _HEAD)
            + _frame(_DATA_FRAME, _END_STREAM, self._stream, struct.pack(">BI", 0, len(data)) + data)
        )
        body, complete = b"", False
        while True:
            kind, flags, stream, payload = self._next()
            at_ns = now_ns()
            if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind in (_RESET, _GOAWAY):
                raise ReaderError(f"the server ended the call with frame {kind}")
            elif stream == self._stream and kind == _DATA_FRAME:
                body += payload
                while len(body) >= 5 and len(body) >= 5 + (size := int.from_bytes(body[1:5], "big")):
                    message = pb.GenerateStreamResponse.FromString(body[5 : 5 + size])
                    body = body[5 + size :]
                    if message.delta.text:
                        yield at_ns, message.delta.text
                    complete = complete or message.HasField("finished")
            elif stream == self._stream and kind == _HEADERS and flags & _END_STREAM:
                if not complete:
                    raise ReaderError("the call ended before its last message")
                return

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _next(self) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream and payload of the next frame."""
        while len(self._buffer) < 9 or len(self._buffer) < 9 + (size := int.from_bytes(self._buffer[:3], "big")):
            data = self._socket.recv(_ROOM)
            if not data:
                raise ReaderError("the server closed the connection")
            self._buffer += data
        kind, flags = self._buffer[3], self._buffer[4]
        stream = int.from_bytes(self._buffer[5:9], "big") & _MOST
        payload, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
        return kind, flags, stream, payload


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()  # below 127 bytes, not Huffman-coded


# By the static table: POST, http, then literals that are not indexed: path, authority, content-type, te.
_HEAD = (
    b"\x83\x86\x04" + _literal(_METHOD) + b"\x01" + _literal("x")
    + b"\x0f\x10" + _literal("application/grpc") + b"\x00" + _literal("te") + _literal("trailers")
)  # fmt: skip


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


@dataclass(slots=True)
class _Timing:
    """Times of one request, in nanoseconds."""

    sent_ns: int
    added_ns: int = 0  # time to the first message, without the engine's share
    ways_ns: list[int] = field(default_factory=list)  # from the engine's step to the client, per message

    def take(self, at_ns: int, text: str) -> None:
        """Record a message that arrived at ``at_ns``."""
        stamps = read_stamps(text)
        if not self.ways_ns:
            self.added_ns = (at_ns - self.sent_ns) - (stamps[1] - stamps[0])
        self.ways_ns.append(at_ns - stamps[-1])


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
        timing = _Timing(now_ns())
        for at_ns, text in reader.read(PROMPT, messages * TOKENS):
            timing.take(at_ns, text)
        found.append(timing)
    return found


def _server(step_ms: float) -> LocalServer:
    config = Config(engine=EngineConfig(target=paced_target(step_ms)), server=ServerConfig(grpc_port=0, http_port=0))
    return LocalServer(config, factory=FACTORY, tokenizer=TOKENIZER)


def _reader(server: LocalServer, protocol: str) -> Reader:
    return GrpcReader(server.grpc_port) if protocol == "grpc" else HttpReader(server.http_port)
