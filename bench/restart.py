"""Measures the prefix cache on disk: the first token after a restart, and the steps while pages are written."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.local_server import LocalServer, private_config
from bench.workloads.workload import long_text
from specdec.client.client import Client
from specdec.client.prompt import GenerateOptions
from specdec.config import Config
from specdec.core.types import Delta, Finished, SamplingParams, StoppingParams
from specdec.load.figures import spread

_DISK_BYTES = 8 << 30
_TOKEN_CHARACTERS = 8  # more than a token of code has on average
_TRACED_STEPS = 1024  # that a server keeps
_STREAM_TOKENS = 64  # of a stream's prompt: few, so that all streams decode together


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """Sizes of the two parts: a prompt before and after a restart, and streams with and without a cache on disk."""

    tokens: int = 4000  # of the prompt
    streams: int = 4
    output: int = 200  # tokens of each stream
    rounds: int = 3  # servers of each kind


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as its reader saw it."""

    first_s: float  # from the request to its first token
    tokens: list[int]
    cached: int  # tokens of the prompt that came from the cache


async def measure_restart(
    config: Config, plan: RestartPlan, note: Callable[[str], None], **server: str
) -> dict[str, Any]:
    """JSON-able figures. server: further arguments of `LocalServer`.

    Raises:
        ChildServerError: the server did not start.
        ConfigError: the configuration has `engines`.
    """
    folder = Path(tempfile.mkdtemp(prefix="specdec-restart-"))
    try:
        kept, plain = _with_disk(config, folder, _DISK_BYTES), _with_disk(config, folder, 0)
        cold, _ = await _first_token(kept, plan, **server)
        note(f"cold: first token of {plan.tokens} tokens after {cold.first_s:.3f} s")
        warm, target = await _first_token(kept, plan, **server)
        note(f"restarted: after {warm.first_s:.3f} s, {warm.cached} tokens from disk")
        steps: dict[str, list[float]] = {"plain": [], "writing": []}
        for number in range(plan.rounds):
            for name, each in (("plain", plain), ("writing", kept)):
                steps[name] += await _steps_ms(each, plan, f"round {number}", **server)
            medians = ", ".join(f"{median(ms):.2f} ms {name}" for name, ms in steps.items())
            note(f"round {number + 1}: steps of {medians}")
    finally:
        shutil.rmtree(folder)
    return {
        "target": target, "tokens": plan.tokens, "cached_tokens": warm.cached,
        "same_tokens": warm.tokens == cold.tokens,
        "cold_s": round(cold.first_s, 3), "warm_s": round(warm.first_s, 3),
        "restart_ratio": round(warm.first_s / cold.first_s, 4),
        "step_plain_ms": spread(steps["plain"]), "step_writing_ms": spread(steps["writing"]),
        "step_ratio": round(median(steps["writing"]) / median(steps["plain"]), 4),
    }  # fmt: skip


def _with_disk(config: Config, folder: Path, room: int) -> Config:
    speculation = config.engine.speculation.model_copy(update={"enabled": False})  # so that all steps are alike
    more = {"kv_disk_bytes": room, "kv_disk_folder": folder, "speculation": speculation}
    engine = config.engine.model_copy(update=more)
    return private_config(config).model_copy(update={"engine": engine})


async def _prompt(client: Client, tokens: int) -> list[int]:
    return (await client.tokenize(long_text()[: tokens * _TOKEN_CHARACTERS]))[:tokens]


async def _first_token(config: Config, plan: RestartPlan, **server: str) -> tuple[Answer, str]:
    """The answer of a new server to the long prompt, and the name of its model."""
    async with LocalServer(config, **server) as running, Client(running.grpc_address) as client:
        ids = await _prompt(client, plan.tokens)
        await client.generate(ids[:100], stopping=StoppingParams(max_tokens=4, ignore_eos=True), cache_salt="warm-up")
        return await _ask(client, ids, 16), (await client.info()).target


async def _ask(client: Client, prompt: Sequence[int], output: int, salt: str = "") -> Answer:
    clock = asyncio.get_running_loop().time
    began_s, first_s, cached, tokens = clock(), 0.0, 0, list[int]()
    stopping = StoppingParams(max_tokens=output, ignore_eos=True)
    options = GenerateOptions(sampling=SamplingParams(temperature=0), stopping=stopping, cache_salt=salt)
    async with aclosing(client.stream(prompt, **options)) as events:
        async for event in events:
            if isinstance(event, Delta):
                first_s = first_s or clock() - began_s
                tokens += event.token_ids
            elif isinstance(event, Finished):
                cached = event.usage.cached_tokens
    return Answer(first_s, tokens, cached)


async def _steps_ms(config: Config, plan: RestartPlan, salt: str, **server: str) -> list[float]:
    """Times of the steps in which all streams of a new server decode, after a long prompt."""
    async with LocalServer(config, **server) as running, Client(running.grpc_address) as client:
        ids = await _prompt(client, plan.tokens)
        await _ask(client, ids, 1, salt)
        prompts = [ids[place * 100 :][:_STREAM_TOKENS] for place in range(plan.streams)]
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(_ask(client, prompt, plan.output, salt))
        steps = await client.trace(_TRACED_STEPS)
    return [
        step.plan_ms + step.realised_draft_ms + step.realised_verify_ms + step.commit_ms
        for step in steps
        if step.sequences == plan.streams and not step.prefill_rows
    ]
