"""The same text typed with and without a session, on one server; what is compared is how long a typist waits."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.local_server import LocalServer
from bench.serve.spread import spread
from bench.typing.keys_log import KeysLog
from bench.typing.stretch import Stretch, find_stretch
from bench.typing.typists import RequestTypist, SessionTypist, Typist
from specdec.client import Client
from specdec.config import Config, EngineConfig, ServerConfig

# Files that models may know by heart, and in turn some of ours, which they can not.
PLACES = (
    "sched:", "specdec.scheduler.scheduler:", "graphlib:", "specdec.kv_cache.kv_cache_manager:", "queue:",
    "server.admission.admission:",
)  # fmt: skip
ARMS: dict[str, Typist] = {"session": SessionTypist(), "requests": RequestTypist()}
_REST_S = 10.0


@dataclass(frozen=True, slots=True)
class TypingPlan:
    """``stretches`` of ``keys`` each, of as many files, typed at ``keys_per_s``; suggestions of ``max_tokens``."""

    keys: int = 80
    keys_per_s: float = 8.0
    stretches: int = 2
    max_tokens: int = 32


async def measure_typing(engine: EngineConfig, plan: TypingPlan, note: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able figures: waits of both arms, their ratio at the median, and pages of the cache before and after.

    Raises:
        LocalServerError: the server did not start.
        CallError: it failed.
    """
    stretches = [find_stretch(place, plan.keys) for place in PLACES[: plan.stretches]]
    logs: dict[str, list[KeysLog]] = {name: [] for name in ARMS}
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=None))
    async with LocalServer(config) as server, Client(server.grpc_address) as client:
        info = await client.info()
        pages_before = await _free_pages(client)
        for number, stretch in enumerate(stretches):
            # Who is first finds a processor that was idle; so each arm is first in turn.
            for name in list(ARMS)[:: -1 if number % 2 else 1]:
                note(f"{stretch.name} {name}")
                logs[name].append(await _type(client, ARMS[name], stretch, plan, f"{name}-{number}"))
        pages_after = await _free_pages(client)
    figures = {name: _figures(found) for name, found in logs.items()}
    return {
        "target": info.target, "dtype": info.dtype, "keys_per_s": plan.keys_per_s, "max_tokens": plan.max_tokens,
        "stretches": [f"{s.name}{len(s.before)}+{len(s.typed)}" for s in stretches], **figures,
        "p50_ratio": _ratio(figures, "wait_ms"), "p50_ratio_text": _ratio(figures, "wait_for_text_ms"),
        "p50_ratio_by_stretch": [
            round(statistics.median(a.waits_ms()) / statistics.median(b.waits_ms()), 4)
            for a, b in zip(logs["session"], logs["requests"], strict=True)
        ],
        "pages_before": pages_before, "pages_after": pages_after, "pages_lost": pages_before - pages_after,
    }  # fmt: skip


async def _type(client: Client, typist: Typist, stretch: Stretch, plan: TypingPlan, salt: str) -> KeysLog:
    log = await typist.type(client, stretch, plan.keys_per_s, plan.max_tokens, salt)
    await _free_pages(client)  # the engine is at rest when the next one begins
    return log


def _figures(logs: list[KeysLog]) -> dict[str, Any]:
    own = [(log.answered_s[key] - log.pressed_s[key]) * 1e3 for log in logs for key in sorted(log.answered_s)]
    keys = sum(len(log.pressed_s) for log in logs)
    return {
        "keys": keys,
        "wait_ms": spread([wait for log in logs for wait in log.waits_ms()]),
        "wait_for_text_ms": spread([wait for log in logs for wait in log.waits_ms(text_only=True)]),
        "answered": sum(len(log.answered_s) for log in logs),
        "answered_with_text": sum(len(log.with_text) for log in logs),
        "answered_before_next_key": round(sum(log.in_time for log in logs) / keys, 4),
        "answer_ms": spread(own),
        "continued": sum(log.continued for log in logs),
    }


def _ratio(figures: dict[str, dict[str, Any]], name: str) -> float | None:
    session, requests = (figures[arm][name].get("p50") for arm in ARMS)
    return round(session / requests, 4) if session is not None and requests else None


async def _free_pages(client: Client) -> int:
    """Pages that nobody uses, once the engine is at rest: as its heartbeats tell, twice the same."""
    until, last = time.monotonic() + _REST_S, -1
    while True:
        load = await client.load()
        resting = not load.running_requests and not load.waiting_requests and load.free_pages > 0
        if (resting and load.free_pages == last) or time.monotonic() > until:
            return load.free_pages
        last = load.free_pages if resting else -1
        await asyncio.sleep(1.1)
