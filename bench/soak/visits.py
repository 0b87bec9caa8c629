"""What clients of a soak do: complete, abandoned, slow and invalid requests over gRPC, HTTP and raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import httpx

from bench.soak.watch import SoakFault
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2
from specdec.client.client import Client, SessionCall
from specdec.client.connection import CallError
from specdec.client.prompt import ChatTurn, CompletionHints, Fim, GenerateOptions, Prompt
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)

TEXTS = 64  # beginnings of prompts: few enough that they come again and are found in the cache
LONGEST = 1500


@dataclass(slots=True)
class Place:
    """``number``: the visitor's. ``text``: what prompts are cut from."""

    number: int
    client: Client
    http: httpx.AsyncClient
    grpc_port: int
    http_port: int
    text: str
    random: Random

    def cut(self, longest: int = LONGEST) -> str:
        """A prompt: one of `TEXTS` beginnings, of some length."""
        begin = self.random.randrange(TEXTS) * (len(self.text) // (2 * TEXTS))
        return self.text[begin : begin + self.random.randrange(20, longest)]


_SCHEMA = '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"n":{"type":"integer"}}}'
_GRAMMARS = (
    GrammarParams(GrammarKind.JSON_SCHEMA, _SCHEMA),
    GrammarParams(GrammarKind.REGEX, "[a-z]{3,12}( [a-z]{1,8}){0,4}"),
    GrammarParams(GrammarKind.CHOICE, '["yes","no","perhaps"]'),
    GrammarParams(GrammarKind.JSON_OBJECT),
)
_STOPS = (("\n\n",), ("def ", "class "), (" ",))
SALTS = ("", "left", "right")


def some_options(place: Place) -> tuple[GenerateOptions, int]:
    """Options of one request, and its number of samples."""
    draw = place.random
    samples = draw.choice((1, 1, 1, 1, 2, 3))
    options = GenerateOptions(
        sampling=SamplingParams(
            temperature=draw.choice((0.0, 0.0, 0.8)), n=samples, top_k=draw.choice((0, 20)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.1)), seed=draw.randrange(1 << 32),
        ),
        stopping=StoppingParams(
            max_tokens=draw.choice((1, 8, 24, 48)), stop=draw.choice((*_STOPS, (), ())),
            time_limit_s=draw.choice((None, None, None, 2.0)),
        ),
        output=OutputParams(logprobs=draw.choice((None, None, None, 5)), trees=draw.random() < 0.05),
        speculation=SpeculationParams(draw.choice(tuple(SpeculationMode))), cache_salt=draw.choice(SALTS),
        priority=draw.choice((0, 0, 1)), target_tpot_ms=draw.choice((None, None, 30.0)),
    )  # fmt: skip
    if draw.random() < 0.3:
        options["grammar"] = draw.choice(_GRAMMARS)
    if draw.random() < 0.2:
        options["prediction"] = place.cut(400)
    if draw.random() < 0.3:
        options["session"] = f"soak-{draw.randrange(4)}"
    return options, samples


def some_body(place: Place, *, stream: bool) -> tuple[dict[str, object], int]:
    """The same for OpenAI's dialect, without the prompt."""
    draw = place.random
    samples = draw.choice((1, 1, 1, 2))
    body: dict[str, object] = {
        "max_tokens": draw.choice((1, 8, 24, 48)), "temperature": draw.choice((0.0, 0.8)), "n": samples,
        "stream": stream, "seed": draw.randrange(1 << 31), "cache_salt": draw.choice(SALTS),
    }  # fmt: skip
    if draw.random() < 0.3:
        body["stop"] = list(draw.choice(_STOPS))
    if draw.random() < 0.2:
        body["response_format"] = {"type": "json_object"}
    return body, samples


OK, LEFT = "ok", "left"
_FAULTS = (
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
)  # fmt: skip
_HINTS = CompletionHints(mode="middle_or_prefix")


def refused(error: CallError) -> str:
    """How an orderly refusal is counted.

    Raises:
        SoakFault: it is none.
    """
    if error.code in _FAULTS:
        raise SoakFault(f"{error.code.name}: {error.message}")
    return f"refused {error.reason or error.code.name}"


async def whole_stream(place: Place) -> str:
    """A text or a conversation, read to its end."""
    options, samples = some_options(place)
    return await _to_the_end(place.client.stream(_prompt(place), **options), samples)


async def whole_answer(place: Place) -> str:
    """The answer in one message."""
    options, samples = some_options(place)
    answer = await place.client.generate(_prompt(place), **options)
    return _complete(len(answer.samples), samples)


async def gap(place: Place) -> str:
    """A gap to fill in."""
    text = place.cut()
    half = len(text) // 2
    stopping = StoppingParams(max_tokens=24)
    events = place.client.completion.complete(Fim(text[:half], text[half:]), _HINTS, stopping=stopping)
    return await _to_the_end(events, 1)


async def leave_after_some(place: Place) -> str:
    """Cancels at one of the first events."""
    options, _ = some_options(place)
    left = place.random.randrange(12)
    async with aclosing(place.client.stream(_prompt(place), **options)) as events:
        async for _ in events:
            if left == 0:
                return LEFT
            left -= 1
    return OK


async def leave_any_time(place: Place) -> str:
    """Cancels wherever the call is then: before it is admitted, in the queue, in its prompt, in its output."""
    reading = asyncio.create_task(whole_stream(place))
    await asyncio.wait([reading], timeout=place.random.choice((0.0, 0.002, 0.02, 0.2, 1.0)))
    if reading.done():
        return reading.result()
    reading.cancel()
    await asyncio.wait([reading])
    return LEFT if reading.cancelled() else reading.result()


async def deadline(place: Place) -> str:
    """Has less time than it may take."""
    options, samples = some_options(place)
    options["timeout_s"] = place.random.uniform(0.02, 2.0)
    return await _to_the_end(place.client.stream(_prompt(place), **options), samples)


async def slow_reader(place: Place) -> str:
    """Much to read, and somebody who does not."""
    options, samples = some_options(place)
    options["output"] = OutputParams(logprobs=20, trees=True)
    ended = 0
    async with aclosing(place.client.stream(_prompt(place), **options)) as events:
        async for event in events:
            ended += isinstance(event, Finished)
            await asyncio.sleep(place.random.choice((0.0, 0.05, 0.3)))
    return _complete(ended, samples)


async def aborted(place: Place) -> str:
    """Another call ends it."""
    options, samples = some_options(place)
    name = options["request_id"] = uuid.uuid4().hex
    ended = 0
    async with aclosing(place.client.stream(_prompt(place), **options)) as events:
        async for event in events:
            if isinstance(event, Delta) and not ended:
                await place.client.abort(name)
            ended += isinstance(event, Finished)
    return _complete(ended, samples)


async def superseded(place: Place) -> str:
    """Two of the same key: the second takes the place of the first."""
    (first, samples), (second, others) = some_options(place), some_options(place)
    first["supersedes_key"] = second["supersedes_key"] = f"soak-{place.number}"
    running = asyncio.create_task(_to_the_end(place.client.stream(_prompt(place), **first), samples))
    await asyncio.wait([running], timeout=place.random.uniform(0.0, 0.3))
    found = await _to_the_end(place.client.stream(_prompt(place), **second), others)
    await running
    return found


async def prefill(place: Place) -> str:
    """No token at all."""
    await place.client.prefill(place.cut())
    return OK


def _prompt(place: Place) -> Prompt:
    return (ChatTurn("user", place.cut(300)),) if place.random.random() < 0.25 else place.cut()


async def _to_the_end(stream: AsyncGenerator[RequestEvent, None], samples: int) -> str:
    ended, aborts = 0, 0
    try:
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ended += 1
                    aborts += event.reason == FinishReason.ABORTED
    except CallError as error:
        return refused(error)
    return _complete(ended, samples) if not aborts else "aborted"


def _complete(ended: int, samples: int) -> str:
    if ended != samples:
        raise SoakFault(f"a stream ended well with {ended} of {samples} samples")
    return OK


_URI = "soak.py"
_KEYS = 12
_PREFIX_CHARACTERS, _SUFFIX_CHARACTERS = 1200, 300


async def typing(place: Place) -> str:
    """Types to the end and waits for every answer; each ask must have just one."""
    open_asks: set[int] = set()
    async with place.client.completion.session() as session:
        reading = asyncio.create_task(_read(session, open_asks))
        try:
            await _type(place, session, open_asks, _KEYS)
            await session.done()
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
    if open_asks:
        raise SoakFault(f"a session ended with {len(open_asks)} asks unanswered")
    return OK


async def typing_and_gone(place: Place) -> str:
    """Types, and is gone in the middle of an answer."""
    async with place.client.completion.session() as session:
        await _type(place, session, set(), place.random.randrange(_KEYS))
        await asyncio.sleep(place.random.choice((0.0, 0.05, 0.5)))
    return LEFT


async def _type(place: Place, session: SessionCall, open_asks: set[int], keys: int) -> None:
    draw = place.random
    at = draw.randrange(_PREFIX_CHARACTERS, len(place.text) - _SUFFIX_CHARACTERS - _KEYS)
    before, typed = place.text[at - draw.randrange(100, _PREFIX_CHARACTERS) : at], place.text[at : at + keys]
    setup = pb.SessionSetup(
        completion=pb.CompletionOptions(mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX),
        stopping=options_pb2.StoppingOptions(max_tokens=16),
        session=options_pb2.SessionOptions(id=f"editor-{place.number}-{draw.randrange(2)}"),
    )  # fmt: skip
    text = pb.DocumentText(
        uri=_URI, version=1, text=before + place.text[at + keys : at + keys + _SUFFIX_CHARACTERS], language="python"
    )
    open_asks.add(1)
    await session.send(pb.CompleteSessionRequest(setup=setup, text=text, ask=_ask(1, len(before), 1)))
    for number, key in enumerate(typed):
        await asyncio.sleep(draw.choice((0.0, 0.05, 0.2)))
        end = len(before) + number
        edit = pb.TextEdit(start=end, end=end, text=key)
        edits = pb.DocumentEdits(uri=_URI, from_version=number + 1, version=number + 2, edits=[edit])
        open_asks.add(number + 2)
        await session.send(pb.CompleteSessionRequest(edits=edits, ask=_ask(number + 2, end + 1, number + 2)))


def _ask(number: int, offset: int, version: int) -> pb.CompletionAsk:
    return pb.CompletionAsk(id=number, cursor=pb.Cursor(uri=_URI, version=version, offset=offset))


async def _read(session: SessionCall, open_asks: set[int]) -> None:
    async for message in session:
        which = message.WhichOneof("event")
        if which in ("finished", "refused", "resync"):
            answered = getattr(message, which).ask_id
            if answered not in open_asks:
                raise SoakFault(f"ask {answered} was answered twice, or never asked")
            open_asks.remove(answered)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NOT_SUPPORTED = 501


async def sse(place: Place) -> str:
    """A stream of OpenAI's, to its last word."""
    path, body, _ = _asked(place, stream=True)
    async with place.http.stream("POST", path, json=body) as response:
        data = (await response.aread()).decode()
    return _judged(response, data.endswith("data: [DONE]\n\n"))


async def sse_left(place: Place) -> str:
    """Gone after some pieces of the answer."""
    path, body, _ = _asked(place, stream=True)
    left = place.random.randrange(8)
    async with place.http.stream("POST", path, json=body) as response:
        async for _ in response.aiter_bytes():
            if left == 0:
                return LEFT
            left -= 1
    return _judged(response, True)


async def whole(place: Place) -> str:
    """In one piece."""
    path, body, samples = _asked(place, stream=False)
    response = await place.http.post(path, json=body)
    return _judged(response, response.status_code != 200 or len(response.json()["choices"]) == samples)


async def whole_left(place: Place) -> str:
    """Gone while it waits."""
    waiting = asyncio.create_task(whole(place))
    await asyncio.wait([waiting], timeout=place.random.choice((0.0, 0.01, 0.1, 0.8)))
    if waiting.done():
        return waiting.result()
    waiting.cancel()
    await asyncio.wait([waiting])
    return LEFT if waiting.cancelled() else waiting.result()


async def lines(place: Place) -> str:
    """Ollama's stream: a JSON object a line."""
    body = {"prompt": place.cut(), "raw": True, "options": {"num_predict": place.random.choice((4, 24))}}
    response = await place.http.post("/api/generate", json=await _named(place, body))
    if response.status_code != 200:
        return _judged(response, True)
    return _judged(response, bool(json.loads(response.text.splitlines()[-1]).get("done")))


async def infill(place: Place) -> str:
    """llama.cpp's gap."""
    text = place.cut()
    half = len(text) // 2
    body = {"input_prefix": text[:half], "input_suffix": text[half:], "n_predict": 16}
    return _judged(await place.http.post("/infill", json=body), True)


async def looks(place: Place) -> str:
    """What monitoring asks."""
    for path in ("/health", "/metrics", "/v1/models"):
        found = _judged(await place.http.get(path), True)
    return found


async def _named(place: Place, body: dict[str, object]) -> dict[str, object]:
    models = (await place.http.get("/v1/models")).json()["data"]
    return {"model": models[0]["id"], **body}


def _asked(place: Place, *, stream: bool) -> tuple[str, dict[str, object], int]:
    body, samples = some_body(place, stream=stream)
    if place.random.random() < 0.3:
        return CHAT, {"messages": [{"role": "user", "content": place.cut(300)}], **body}, samples
    return COMPLETIONS, {"prompt": place.cut(), **body}, samples


def _judged(response: httpx.Response, complete: bool) -> str:
    status = response.status_code
    if status == 200:
        if not complete:
            raise SoakFault(f"{response.request.url.path} ended in the middle")
        return OK
    if status >= 500 and status != NOT_SUPPORTED:
        raise SoakFault(f"{response.request.url.path}: status {status}")
    return f"refused {status}"


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SMALL_BUFFER = 2048


async def half_a_head(place: Place) -> str:
    """Headers that never end."""
    async with _connected(place.http_port) as connection:
        await _send(connection, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
        await _linger(place)
    return LEFT


async def half_a_body(place: Place) -> str:
    """A body that never ends."""
    async with _connected(place.http_port) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n"
        await _send(connection, head + b'{"prompt":')
        await _linger(place)
    return LEFT


async def silence(place: Place) -> str:
    """Connected, to either port, and no more."""
    async with _connected(place.random.choice((place.http_port, place.grpc_port))):
        await _linger(place)
    return LEFT


async def half_open(place: Place) -> str:
    """HTTP/2 that is begun, and then nothing is answered, not even a ping."""
    async with _connected(place.grpc_port) as connection:
        await _send(connection, _PREFACE + (_SETTINGS if place.random.random() < 0.5 else b""))
        await _linger(place)
    return LEFT


async def never_read(place: Place) -> str:
    """Asks for much and reads nothing of it."""
    body = {"prompt": place.cut(), "max_tokens": 48, "n": 3, "stream": True, "logprobs": 5, "return_token_ids": True}
    async with _connected(place.http_port) as connection:
        await _post(connection, body)
        await _linger(place)
    return LEFT


async def half_closed(place: Place) -> str:
    """Says that it will send no more, and waits for the answer; either is an end."""
    async with _connected(place.http_port) as connection:
        await _post(connection, {"prompt": place.cut(200), "max_tokens": 8})
        connection.shutdown(socket.SHUT_WR)
        await asyncio.get_running_loop().sock_recv(connection, 1 << 16)
    return LEFT


async def nonsense(place: Place) -> str:
    """Bytes that are no HTTP at all, to either port."""
    port = place.random.choice((place.http_port, place.grpc_port))
    async with _connected(port) as connection:
        await _send(connection, place.random.randbytes(place.random.randrange(1, 400)))
        await _linger(place)
    return LEFT


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[socket.socket]:
    """A connection with hardly any room to receive, that is reset in the end, as one whose client is gone."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):  # a server may hang up on such clients at any time
            yield connection


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _post(connection: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    await _send(
        connection, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )


async def _linger(place: Place) -> None:
    await asyncio.sleep(place.random.choice((0.0, 0.1, 1.0, 5.0)))


Visit = Callable[[Place], Coroutine[Any, Any, str]]
VISITS: dict[Visit, int] = {
    whole_stream: 6,
    whole_answer: 3,
    gap: 3,
    leave_after_some: 4,
    leave_any_time: 6,
    deadline: 3,
    slow_reader: 2,
    aborted: 2,
    superseded: 2,
    prefill: 2,
    typing: 4,
    typing_and_gone: 3,
    sse: 4,
    sse_left: 3,
    whole: 3,
    whole_left: 4,
    lines: 2,
    infill: 2,
    looks: 1,
    half_a_head: 1,
    half_a_body: 1,
    silence: 1,
    half_open: 1,
    never_read: 2,
    half_closed: 1,
    nonsense: 1,
}


async def outcome_of(visit: Visit, place: Place) -> str:
    """How ``visit`` ended, an orderly refusal among the ways.

    Raises:
        SoakFault: not as it may.
    """
    try:
        return await visit(place)
    except CallError as error:
        return refused(error)


def name_of(visit: Visit) -> str:
    """As the table of a soak has it."""
    return visit.__name__.replace("_", " ")
