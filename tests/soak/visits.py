"""What the clients of a soak do: complete, abandoned, slow and invalid requests over gRPC, HTTP and raw sockets."""

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

from bench.typing_bench import Stretch, TypingPlan, type_in_session
from specdec.client.client import Client
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
from tests.soak.watch import SoakFault

TEXTS = 64  # beginnings of prompts: few enough that prompts hit the prefix cache
LONGEST = 1500  # characters of a prompt


@dataclass(slots=True)
class Place:
    """What a visit needs."""

    number: int  # of the visitor
    client: Client
    http: httpx.AsyncClient
    grpc_port: int
    http_port: int
    text: str  # prompts are parts of it
    random: Random

    def cut(self, longest: int = LONGEST) -> str:
        """A prompt of random length, from one of `TEXTS` beginnings."""
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
    """Random options of one request, and its number of samples."""
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
    """The same in OpenAI's dialect, as a body without the prompt."""
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
    """The outcome of a refused call.

    Raises:
        SoakFault: the error is no refusal.
    """
    if error.code in _FAULTS:
        raise SoakFault(f"{error.code.name}: {error.message}")
    return f"refused {error.reason or error.code.name}"


async def whole_stream(place: Place) -> str:
    """Reads a stream of text or chat to its end."""
    options, samples = some_options(place)
    return await _to_the_end(place.client.stream(_prompt(place), **options), samples)


async def whole_answer(place: Place) -> str:
    """Receives the answer in one message."""
    options, samples = some_options(place)
    answer = await place.client.generate(_prompt(place), **options)
    return _complete(len(answer.samples), samples)


async def gap(place: Place) -> str:
    """Fills a gap."""
    text = place.cut()
    half = len(text) // 2
    stopping = StoppingParams(max_tokens=24)
    events = place.client.completion.complete(Fim(text[:half], text[half:]), _HINTS, stopping=stopping)
    return await _to_the_end(events, 1)


async def cancelled_stream(place: Place) -> str:
    """Cancels at any time: before admission, in the queue, during prefill, during decoding."""
    return await _leave(place, whole_stream(place))


async def deadline(place: Place) -> str:
    """Sends a deadline that is often too short."""
    options, samples = some_options(place)
    options["timeout_s"] = place.random.uniform(0.02, 2.0)
    return await _to_the_end(place.client.stream(_prompt(place), **options), samples)


async def slow_reader(place: Place) -> str:
    """Reads large messages slowly."""
    options, samples = some_options(place)
    options["output"] = OutputParams(logprobs=20, trees=True)
    ended = 0
    async with aclosing(place.client.stream(_prompt(place), **options)) as events:
        async for event in events:
            ended += isinstance(event, Finished)
            await asyncio.sleep(place.random.choice((0.0, 0.05, 0.3)))
    return _complete(ended, samples)


async def aborted(place: Place) -> str:
    """Aborts the request by a second call."""
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
    """Sends a second request that supersedes the first."""
    (first, samples), (second, others) = some_options(place), some_options(place)
    first["supersedes_key"] = second["supersedes_key"] = f"soak-{place.number}"
    running = asyncio.create_task(_to_the_end(place.client.stream(_prompt(place), **first), samples))
    await asyncio.wait([running], timeout=place.random.uniform(0.0, 0.3))
    found = await _to_the_end(place.client.stream(_prompt(place), **second), others)
    await running
    return found


def _prompt(place: Place) -> Prompt:
    return (ChatTurn("user", place.cut(300)),) if place.random.random() < 0.25 else place.cut()


async def _leave(place: Place, visit: Coroutine[Any, Any, str]) -> str:
    """Cancel ``visit`` after a random time, unless it has ended."""
    running = asyncio.create_task(visit)
    await asyncio.wait([running], timeout=place.random.choice((0.0, 0.002, 0.02, 0.2, 1.0)))
    running.cancel()
    await asyncio.wait([running])
    return LEFT if running.cancelled() else running.result()


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
        raise SoakFault(f"a stream ended without an error after {ended} of {samples} samples")
    return OK


_KEYS = 12
_PREFIX_CHARACTERS, _SUFFIX_CHARACTERS = 1200, 300


async def typing(place: Place) -> str:
    """Types in an editor session until the last ask is answered; some sessions end before."""
    draw = place.random
    at = draw.randrange(_PREFIX_CHARACTERS, len(place.text) - _SUFFIX_CHARACTERS - _KEYS)
    before, typed = place.text[at - draw.randrange(100, _PREFIX_CHARACTERS) : at], place.text[at : at + _KEYS]
    stretch = Stretch("soak", before, typed, place.text[at + _KEYS : at + _KEYS + _SUFFIX_CHARACTERS])
    plan = TypingPlan(keys_per_s=draw.choice((5.0, 20.0, 500.0)), max_tokens=16)

    async def to_the_end() -> str:
        await type_in_session(place.client, stretch, plan, draw.choice(SALTS))
        return OK

    return await to_the_end() if draw.random() < 0.6 else await _leave(place, to_the_end())


async def http_stream(place: Place) -> str:
    """Reads a stream of OpenAI's to its end."""
    path, body, _ = _asked(place, stream=True)
    async with place.http.stream("POST", path, json=body) as response:
        data = (await response.aread()).decode()
    return _judged(response, data.endswith("data: [DONE]\n\n"))


async def http_answer(place: Place) -> str:
    """Receives an answer of OpenAI's in one piece."""
    path, body, samples = _asked(place, stream=False)
    response = await place.http.post(path, json=body)
    return _judged(response, response.status_code != 200 or len(response.json()["choices"]) == samples)


async def cancelled_http(place: Place) -> str:
    """Closes the connection at any time."""
    return await _leave(place, place.random.choice((http_stream, http_answer))(place))


def _asked(place: Place, *, stream: bool) -> tuple[str, dict[str, object], int]:
    body, samples = some_body(place, stream=stream)
    if place.random.random() < 0.3:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": place.cut(300)}], **body}, samples
    return "/v1/completions", {"prompt": place.cut(), **body}, samples


def _judged(response: httpx.Response, complete: bool) -> str:
    status = response.status_code
    if status == 200:
        if not complete:
            raise SoakFault(f"{response.request.url.path}: the answer is incomplete")
        return OK
    if status >= 500 and status != NOT_SUPPORTED:
        raise SoakFault(f"{response.request.url.path}: status {status}")
    return f"refused {status}"


NOT_SUPPORTED = 501
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_PREFACE, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAGMENTS = (
    b"", _POST + b"x-slow: ", _POST + b'content-length: 900\r\n\r\n{"prompt":', _PREFACE, _PREFACE + _SETTINGS,
)  # fmt: skip
_SMALL_BUFFER = 2048  # bytes


async def fragment(place: Place) -> str:
    """Sends the beginning of a request, or bytes that are no request, to either port; then nothing."""
    noise = place.random.randbytes(place.random.randrange(1, 400))
    async with _connected(place.random.choice((place.http_port, place.grpc_port))) as connection:
        await _send(connection, place.random.choice((*_FRAGMENTS, noise)))
        await _linger(place)
    return LEFT


async def never_read(place: Place) -> str:
    """Requests long answers and reads nothing."""
    body = {"prompt": place.cut(), "max_tokens": 48, "n": 3, "stream": True, "logprobs": 5, "return_token_ids": True}
    data = json.dumps(body).encode()
    async with _connected(place.http_port) as connection:
        await _send(connection, _POST + b"content-length: %d\r\n\r\n" % len(data) + data)
        await _linger(place)
    return LEFT


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[socket.socket]:
    """A connection with a small receive buffer that is reset at the end, as by a client that crashed."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):  # the server may close such connections at any time
            yield connection


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _linger(place: Place) -> None:
    await asyncio.sleep(place.random.choice((0.0, 0.1, 1.0, 5.0)))


Visit = Callable[[Place], Coroutine[Any, Any, str]]
VISITS: dict[Visit, int] = {
    whole_stream: 6,
    whole_answer: 3,
    gap: 3,
    cancelled_stream: 10,
    deadline: 3,
    slow_reader: 2,
    aborted: 2,
    superseded: 2,
    typing: 7,
    http_stream: 4,
    http_answer: 3,
    cancelled_http: 7,
    fragment: 6,
    never_read: 2,
}
"""Relative frequencies."""


async def outcome_of(visit: Visit, place: Place) -> str:
    """The outcome of ``visit``; a refusal is one.

    Raises:
        SoakFault: the server misbehaved.
    """
    try:
        return await visit(place)
    except CallError as error:
        return refused(error)


def name_of(visit: Visit) -> str:
    """The visit's name in the report."""
    return visit.__name__.replace("_", " ")
