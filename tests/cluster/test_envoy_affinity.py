"""Typing users on four replicas: prefix hits and balance."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from bench.typing_bench import PLACES, find_stretch
from tests.cluster.envoy_fleet import EnvoyFleet, envoy_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKSPACES, KEYS, BEFORE, TOKENS = 240, 12, 1500, 2
AT_ONCE = 32


class Asks(NamedTuple):
    """The name of a workspace, and its prompt after each keystroke."""

    workspace: str
    prompts: list[str]


class Found(NamedTuple):
    """The prefix-hit rate, and the number of calls of each replica."""

    hit_rate: float
    calls: list[int]

    @property
    def imbalance(self) -> float:
        """The largest number over the mean."""
        return max(self.calls) * len(self.calls) / sum(self.calls)


def trace() -> list[Asks]:
    """The code of the typing workload, in a file per workspace, with a request after every keystroke."""
    stretches = [find_stretch(place, KEYS) for place in PLACES]
    found = []
    for number in range(WORKSPACES):
        stretch = stretches[number % len(stretches)]
        begin = f"# workspace {number}\n{stretch.before[-BEFORE:]}"
        prompts = [begin + stretch.typed[:key] for key in range(1, KEYS + 1)]
        found.append(Asks(f"workspace-{number}", prompts))
    return found


async def typed(urls: Sequence[str], salt: str) -> float:
    """All workspaces type, `AT_ONCE` at a time; call i goes to URL i modulo their number. Returns the hit rate."""
    waiting, turn, prompt_tokens, cached = iter(trace()), 0, 0, 0
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def author() -> None:
            nonlocal turn, prompt_tokens, cached
            for asks in waiting:
                for prompt in asks.prompts:
                    url, turn = urls[turn % len(urls)], turn + 1
                    body = {"prompt": prompt, "max_tokens": TOKENS, "cache_salt": salt}
                    headers = {"x-workspace-id": asks.workspace}
                    answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
                    assert answer.status_code == 200, answer.text
                    usage = answer.json()["usage"]
                    prompt_tokens += usage["prompt_tokens"]
                    cached += usage["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*(author() for _ in range(AT_ONCE)))
    return cached / prompt_tokens


async def calls_by_replica(fleet: EnvoyFleet) -> dict[str, int]:
    """Envoy's count of calls with a key, by replica."""
    async with httpx.AsyncClient(trust_env=False) as client:
        lines = (await client.get(f"http://{fleet.envoy.admin.address}/clusters")).text
    found = dict.fromkeys((f"127.0.0.1:{server.http_port}" for server in fleet.servers.values()), 0)
    for host, count in re.findall(r"\.http\.affine::([0-9.:]+)::rq_total::(\d+)", lines):
        found[host] += int(count)
    return found


async def test_editor_sessions_keep_their_replica_and_overload_none(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"] * 4, "scripted:4:1:12000") as fleet:
        every = [fleet.direct(name) for name in fleet.servers]
        one = await typed(every[:1], "one")
        before = await calls_by_replica(fleet)
        four = await typed([fleet.http], "four")
        after = await calls_by_replica(fleet)
        round_robin = await typed(every, "round-robin")
    found = Found(four, [after[host] - before[host] for host in after])
    print(f"hit rate: one {one:.3f}, four {four:.3f}, round robin {round_robin:.3f}; calls {found.calls}")
    assert sum(found.calls) == WORKSPACES * KEYS
    assert found.hit_rate >= 0.9 * one
    assert found.hit_rate > round_robin
    assert found.imbalance <= 1.25
