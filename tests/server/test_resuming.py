"""Streams that are cut, or whose server is killed, resume on another server and equal an undisturbed stream in every
token, character and figure."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import httpx
import pytest

from bench.local_server import LocalServer
from specdec.client import CallError, Client, RetryPolicy
from specdec.client.prompt import GenerateOptions
from specdec.config import Config, ServerConfig
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    ResumeParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    Started,
    StoppingParams,
    TokenLogprobs,
)
from tests.engine.tiny_engine import tiny_parts

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
QUICK = RetryPolicy(attempts=30, first_s=0.02, longest_s=60, resumes=30)
TOKENS = 120


def server(*, drafts: bool) -> LocalServer:
    """Replicas differ in all that must not show."""
    config = tiny_parts().config
    speculation = config.speculation.model_copy(update={} if drafts else {"drafters": ("suffix",)})
    changes = {"speculation": speculation, "threads": 1, "max_batch": 8 if drafts else 5, "kv_tokens": 64 * 64}
    changes |= {} if drafts else {"draft": None}
    return LocalServer(Config(engine=config.model_copy(update=changes), server=ServerConfig(grpc_port=0, http_port=0)))


@dataclass
class Answer:
    """One sample as its reader saw it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    matched_stop: str | int | None = None
    output_tokens: int = 0


@dataclass
class Read:
    """A request's answers, by sample; ``resumed``: samples that arrived in more than one part."""

    answers: dict[int, Answer]
    resumed: int


def ask(number: int) -> tuple[list[int], GenerateOptions]:
    """Prompts and options of every kind, by a number."""
    draw = random.Random(number)
    prompt = [draw.randrange(5, 300) for _ in range(4)] * draw.randrange(2, 20)
    greedy = number % 3 == 0
    sampling = SamplingParams(
        temperature=0.0 if greedy else 0.9, seed=None if greedy else draw.randrange(1 << 53),
        n=2 if number % 7 == 3 else 1,
        frequency_penalty=0.3 if number % 5 == 0 else 0.0, repetition_penalty=1.2 if number % 5 == 1 else 1.0,
    )  # fmt: skip
    stop = ("e", "\n\n") if number % 4 == 1 else ()
    stopping = StoppingParams(max_tokens=TOKENS, min_tokens=TOKENS // 2 if stop else 0, stop=stop, ignore_eos=True)
    options = GenerateOptions(
        sampling=sampling,
        stopping=stopping,
        output=OutputParams(logprobs=1 if number % 6 == 2 else None),
        speculation=SpeculationParams((SpeculationMode.OFF, SpeculationMode.ON, SpeculationMode.AUTO)[number % 3]),
    )
    if number % 8 == 4:
        options["grammar"] = GrammarParams(GrammarKind.REGEX, "(ab|c d\n|[0-9]{3}x)+")
    return prompt, options


async def read(client: Client, number: int, saw: Callable[[], None] = lambda: None) -> Read:
    prompt, options = ask(number)
    found = Read({}, 0)
    started = 0
    async with aclosing(client.stream(prompt, **options)) as events:
        async for event in events:
            if isinstance(event, Started):
                started += 1
            elif isinstance(event, Delta):
                answer = found.answers.setdefault(event.index, Answer())
                answer.tokens += event.token_ids
                answer.text += event.text
                answer.logprobs += event.logprobs
                saw()
            elif isinstance(event, Finished):
                answer = found.answers.setdefault(event.index, Answer())
                assert answer.reason is None
                answer.reason, answer.matched_stop = event.reason, event.matched_stop
                answer.output_tokens = event.usage.output_tokens
                found.resumed += event.usage.resumed_tokens > 0
    assert started == 1
    return found


class Cutter:
    """A proxy that sends each connection to the next of ``ports``, and ends it after some bytes of its answers. Every
    other one is reset, which loses what the client has not read."""

    def __init__(self, ports: list[int], draw: random.Random) -> None:
        self._ports, self._draw = ports, draw
        self.cuts = self._connections = 0

    async def serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self._ports[self._connections % len(self._ports)]
        self._connections += 1
        budget = self._draw.randrange(700, 5000)
        upstream, to_server = await asyncio.open_connection("127.0.0.1", port)
        forwarding = asyncio.create_task(self._forward(client, to_server))
        try:
            while budget > 0 and (data := await upstream.read(budget)):
                budget -= len(data)
                writer.write(data)
                await writer.drain()
            self.cuts += budget <= 0
        except ConnectionError:
            pass
        finally:
            forwarding.cancel()
            if self._connections % 2:
                writer.transport.abort()
            else:
                writer.close()
            to_server.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def cutting(ports: list[int], seed: int) -> AsyncIterator[tuple[str, Cutter]]:
    cutter = Cutter(ports, random.Random(seed))
    listening = await asyncio.start_server(cutter.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", cutter
    finally:
        listening.close()


async def through(address: str, number: int) -> Read:
    """On a separate connection, so that a cut affects this stream alone."""
    async with Client(address, retry=QUICK) as client:
        return await read(client, number)


async def uncut(address: str, numbers: range) -> list[Read]:
    async with Client(address, retry=QUICK) as client:
        return await asyncio.gather(*(read(client, number) for number in numbers))


async def killed_on_the_way(victim: LocalServer, other: LocalServer, numbers: range) -> list[Read]:
    """All are read from ``victim``, which is killed while they are."""
    seen, enough = 0, TOKENS * len(numbers) // 6
    processes = [victim.frontend, *victim.frontend.children()]

    def saw() -> None:
        nonlocal seen
        seen += 1
        if seen == enough:
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)

    async with Client(f"{victim.grpc_address},{other.grpc_address}", retry=QUICK) as client:
        return await asyncio.gather(*(read(client, number, saw=saw) for number in numbers))


async def check_http(url: str, fingerprint: str) -> None:
    """The same in OpenAI's dialect, by hand: half of the tokens, and then the rest."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        base = {
            "prompt": [7, 8, 9] * 5, "max_tokens": 24, "temperature": 0.8, "seed": 11, "logprobs": 1,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        whole = (await http.post("/v1/completions", json=base)).raise_for_status().json()
        assert whole["system_fingerprint"].endswith(fingerprint)
        (choice,) = whole["choices"]
        resume = {"token_ids": choice["token_ids"][:10], "text_characters": 0, "numeric_fingerprint": fingerprint}
        rest = (await http.post("/v1/completions", json=base | {"resume": resume})).raise_for_status().json()
        (other,) = rest["choices"]
        assert other["token_ids"] == choice["token_ids"][10:]
        assert other["text"] == choice["text"]
        assert other["finish_reason"] == choice["finish_reason"]
        assert {name: values[10:] for name, values in choice["logprobs"].items()} == other["logprobs"]
        assert rest["usage"]["completion_tokens"] == 24
        assert rest["usage"]["completion_tokens_details"]["resumed_tokens"] == 10
        for changes, status, field_name in (
            ({"resume": resume | {"numeric_fingerprint": "f" * 32}}, 409, "resume.numeric_fingerprint"),
            ({"resume": resume | {"token_ids": [1 << 20]}}, 400, "resume.token_ids"),
            ({"resume": resume | {"text_characters": 9999}}, 400, "resume.text_characters"),
            ({"resume": resume | {"tokens": []}}, 400, "resume.tokens"),
            ({"resume": resume, "echo": True}, 400, "resume"),
            ({"resume": resume, "n": 2}, 400, "n"),
            ({"resume": resume, "seed": None}, 400, "seed"),
        ):
            refused = await http.post("/v1/completions", json=base | changes)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, field_name), refused.text


async def check_refusal(address: str) -> None:
    async with Client(address, retry=QUICK) as client:
        stream = client.stream([7] * 9, sampling=SamplingParams(seed=1), resume=ResumeParams((5,), None, "0" * 32))
        with pytest.raises(CallError, match="what differs: weights") as caught:
            await anext(stream)
    assert (caught.value.code, caught.value.reason) == (FAILED_PRECONDITION, "NUMERIC_FINGERPRINT_MISMATCH")


@pytest.mark.parametrize("streams", [20, pytest.param(200, marks=pytest.mark.slow)])
async def test_cut_streams_are_resumed_without_a_difference(streams: int) -> None:
    """Over two servers, one of which drafts with a model. Half of the streams are cut by a proxy at random places, as
    often as they come to one; under the others their server is killed."""
    first, second = server(drafts=True), server(drafts=False)
    numbers, by_proxy, by_kill = range(streams), range(streams // 2), range(streams // 2, streams)
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(ProcessLookupError))  # one of them is dead by then
        await asyncio.gather(*(stack.enter_async_context(each) for each in (first, second)))
        async with Client(first.grpc_address) as one, Client(second.grpc_address) as two:
            fingerprints = {(await each.info()).numeric_fingerprint for each in (one, two)}
        (fingerprint,) = fingerprints
        expected = await uncut(second.grpc_address, numbers)
        await check_http(f"http://127.0.0.1:{second.http_port}", fingerprint)
        await check_refusal(second.grpc_address)
        async with cutting([first.grpc_port, second.grpc_port], seed=streams) as (address, cutter):
            found = await asyncio.gather(*(through(address, number) for number in by_proxy))
        assert cutter.cuts >= streams // 2
        killed = await killed_on_the_way(first, second, by_kill)
    print(f"{cutter.cuts} cuts; {sum(e.resumed for e in found)} and {sum(e.resumed for e in killed)} samples resumed")
    assert sum(each.resumed for each in killed) >= 3
    assert sum(each.resumed for each in found) >= streams // 4
    for number, cut, whole in zip(numbers, [*found, *killed], expected, strict=True):
        assert cut.answers == whole.answers, ask(number)
