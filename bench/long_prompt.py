"""Measures the gaps of running streams during the prefill of a long prompt, and requests that arrive behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.local_server import LocalServer, private_config
from bench.workloads.workload import long_text
from specdec.client.client import Client
from specdec.config import Config
from specdec.core.types import Delta, StoppingParams
from specdec.errors import SpecdecError
from specdec.load.figures import spread

_CHARACTERS = 300  # of a stream's prompt
_TOKEN_CHARACTERS = 8  # more than a token of code has on average


@dataclass(frozen=True, slots=True)
class LongPromptPlan:
    """Sizes of the two parts: a prompt while streams run, and short requests that arrive during a long prompt."""

    streams: int = 4  # that run during a round
    tokens: int = 3600  # of the prompt that arrives while the streams run
    rounds: int = 3
    before_s: float = 2.0  # seconds that the streams run before the prompt arrives
    long_tokens: int = 8000  # of the prompt in the second part, where no streams run
    short_output: int = 8  # tokens of output of each short request, sent one at a time


@dataclass(slots=True)
class StreamLog:
    """Arrival times of the parts of one answer, in seconds of the event loop's clock."""

    times_s: list[float] = field(default_factory=list)

    async def follow(self, client: Client, prompt: Sequence[int], max_tokens: int, salt: str) -> None:
        """Requests exactly ``max_tokens`` tokens and records the time of each part."""
        clock = asyncio.get_running_loop().time
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
        async with aclosing(client.stream(prompt, stopping=stopping, cache_salt=salt)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    self.times_s.append(clock())

    @property
    def last_s(self) -> float:
        """Arrival time of the last part; 0 before the first."""
        return self.times_s[-1] if self.times_s else 0.0

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Gaps between parts, in ms, that overlap the interval from ``begin_s`` to ``end_s``."""
        return [(b - a) * 1e3 for a, b in pairwise(self.times_s) if b > begin_s and a < end_s]


async def measure_long_prompt(
    config: Config, plan: LongPromptPlan, note: Callable[[str], None], **server: str
) -> dict[str, Any]:
    """JSON-able figures: gaps of the streams before and during the prompt, times of the prompt alone and with streams,
    and times of short requests alone and behind a long prompt.

    server: further arguments of `LocalServer`.

    Raises:
        ChildServerError: the server did not start.
        ConfigError: the configuration has `engines`.
        SpecdecError: the model's context is too short for the plan.
    """
    async with LocalServer(private_config(config), **server) as running, Client(running.grpc_address) as client:
        info = await client.info()
        room = info.max_context - plan.short_output
        if max(plan.tokens, plan.long_tokens) > room:
            raise SpecdecError(f"long prompt: at most {room} tokens fit the model's context; ask for fewer")
        most = max(plan.tokens, plan.long_tokens)
        ids = (await client.tokenize(long_text()[: most * _TOKEN_CHARACTERS]))[:most]
        await client.generate(ids[:500], stopping=StoppingParams(max_tokens=32, ignore_eos=True), cache_salt="warm")
        figures: dict[str, Any] = {"target": info.target, "streams": plan.streams, "tokens": plan.tokens}
        figures |= await _beside_streams(client, ids, plan, note)
        figures |= await _behind_long(client, ids, plan, note, config.engine.prefill_chunk)
    return figures


async def _beside_streams(
    client: Client, ids: Sequence[int], plan: LongPromptPlan, note: Callable[[str], None]
) -> dict[str, Any]:
    before: list[float] = []
    during: list[float] = []
    alone_s, beside_s = [], []
    for number in range(plan.rounds):
        alone_s.append(await _timed(client, ids[: plan.tokens], 1, f"alone {number}"))
        begin_s, end_s, logs = await _one_round(client, ids, plan, number)
        beside_s.append(end_s - begin_s)
        before += [gap for log in logs for gap in log.gaps_ms(begin_s - plan.before_s / 2, begin_s)]
        during += [gap for log in logs for gap in log.gaps_ms(begin_s, end_s)]
        note(f"round {number + 1}: read in {alone_s[-1]:.2f} s alone, {beside_s[-1]:.2f} s beside streams")
    return {
        "gaps_before_ms": spread(before), "gaps_during_ms": spread(during),
        "read_alone_s": spread(alone_s), "read_beside_s": spread(beside_s),
    }  # fmt: skip


async def _one_round(
    client: Client, ids: Sequence[int], plan: LongPromptPlan, number: int
) -> tuple[float, float, list[StreamLog]]:
    """Times at which the prompt was sent and answered, and the logs of the streams."""
    clock = asyncio.get_running_loop().time
    logs = [StreamLog() for _ in range(plan.streams)]
    prompts = [ids[place * 100 :][: _CHARACTERS // 4] for place in range(plan.streams)]
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(log.follow(client, prompt, 2000, f"stream {number}"))
            for log, prompt in zip(logs, prompts, strict=True)
        ]
        await asyncio.sleep(plan.before_s)
        begin_s = clock()
        await _timed(client, ids[: plan.tokens], 1, f"beside {number}")
        end_s = clock()
        # The gap that spans the end is complete with the next part.
        while any(not stream.done() and log.last_s <= end_s for stream, log in zip(streams, logs, strict=True)):
            await asyncio.sleep(0.005)
        for stream in streams:
            stream.cancel()
    return begin_s, end_s, logs


async def _behind_long(
    client: Client, ids: Sequence[int], plan: LongPromptPlan, note: Callable[[str], None], chunk: int
) -> dict[str, Any]:
    short = ids[:2]
    alone_s = [await _timed(client, short, plan.short_output, "") for _ in range(20)]
    behind_s: list[float] = []
    reading = asyncio.create_task(_timed(client, ids[: plan.long_tokens], 1, "long"))
    await asyncio.sleep(0.05)
    while not behind_s or not reading.done():
        behind_s.append(await _timed(client, short, plan.short_output, ""))
        await asyncio.sleep(0.1)
    long_s = await reading
    # A prompt of which all but the last chunk is cached.
    chunk_s = await _timed(client, [*ids[: max(0, plan.long_tokens - chunk)], *ids[:chunk]], 1, "long")
    note(f"{len(behind_s)} short requests while {plan.long_tokens} tokens were read in {long_s:.2f} s")
    return {
        "long_tokens": plan.long_tokens, "long_s": round(long_s, 3),
        "chunk_s": round(chunk_s, 3),
        "short_alone_s": spread(alone_s), "short_behind_s": spread(behind_s),
    }  # fmt: skip


async def _timed(client: Client, prompt: Sequence[int], max_tokens: int, salt: str) -> float:
    """Seconds of a whole answer of ``max_tokens`` tokens."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await client.generate(prompt, stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True), cache_salt=salt)
    return clock() - began
