"""Events of a whole server: what a router learns through requests, flushes, and the crash of an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from server.engine_supervisor import EngineState
from server.kv_event_messages import block_hash
from server.serving import Serving
from specdec.config import KvEventsConfig
from specdec.core.kv_cache import page_key, root_key
from specdec.errors import ConfigError
from tests.fake_engine import CACHING
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import Harness, make_config, quick_policy, stream_request
from tests.server.kv_events.subscriber import Follower


@asynccontextmanager
async def followed(folder: Path, **more: Any) -> AsyncIterator[tuple[Serving, Follower, Harness]]:
    """A server whose events are followed from the first one."""
    events = KvEventsConfig(endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay", **more)
    serving = Serving(
        make_config(kv_events=events, http_port=0), lambda _: FakeTokenizer(), factory=CACHING, policy=quick_policy()
    )
    addresses = await serving.start()
    assert events.endpoint is not None
    follower = Follower(events.endpoint, events.replay_endpoint)
    try:
        await serving.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
            yield serving, follower, Harness(serving, addresses, channel)
    finally:
        follower.close()
        await serving.stop()


async def ask(server: Harness, text: str, **rest: Any) -> None:
    request = stream_request(text, **rest)
    request.stopping.max_tokens = 1
    async for _ in server.generation.GenerateStream(request):
        pass


async def follows(serving: Serving, follower: Follower, blocks: set[int]) -> None:
    """Wait until the follower has exactly ``blocks``, by messages or by replay."""
    async with asyncio.timeout(15):
        while set(follower.view.blocks) != blocks:
            await follower.catch_up()


def blocks_of(text: str, salt: str = "") -> list[int]:
    ids, key, found = FakeTokenizer().encode(text), root_key(salt), []
    for start in range(0, len(ids) - 64, 64):
        key = page_key(key, ids[start : start + 64])
        found.append(block_hash(key))
    return found


@pytest.mark.parametrize("form", ["map", "positional"])
async def test_a_router_learns_what_is_cached(tmp_path: Path, form: str) -> None:
    async with followed(tmp_path, format=form) as (serving, follower, server):
        first, second = "a" * 200, "a" * 70 + "b" * 130
        await ask(server, first)
        await follows(serving, follower, set(blocks_of(first)))
        await ask(server, second)
        await follows(serving, follower, {*blocks_of(first), *blocks_of(second)})
        await ask(server, "c" * 500)  # fills the cache: the rest goes
        fresh = blocks_of("c" * 500)
        async with asyncio.timeout(15):
            while not set(fresh) <= set(follower.view.blocks):
                await follower.catch_up()
        assert len(follower.view.blocks) <= 8
        await ask(server, "d" * 200, salt="secret")  # evicts others, and publishes nothing itself
        before = len(follower.view.blocks)
        async with asyncio.timeout(15):
            while len(follower.view.blocks) == before:
                await follower.catch_up()
        assert not set(blocks_of("d" * 200, "secret")) & set(follower.view.blocks)


async def test_a_crashed_engine_has_an_empty_cache(tmp_path: Path) -> None:
    async with followed(tmp_path) as (serving, follower, server):
        await ask(server, "a" * 200)
        await follows(serving, follower, set(blocks_of("a" * 200)))
        assert serving.client.engine.pid is not None
        feed = serving.client.engine.cache_feed
        assert feed is not None
        before = feed.messages
        os.kill(serving.client.engine.pid, signal.SIGKILL)
        await follows(serving, follower, set())
        engine = serving.client.engine
        async with asyncio.timeout(15):
            while engine.state != EngineState.READY or not engine.restarts:
                await engine.change.wait()
        assert feed.messages == before + 2  # when it died, and when the next one began
        await ask(server, "b" * 200)
        await follows(serving, follower, set(blocks_of("b" * 200)))
        whole = Follower(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
        numbers = await whole.catch_up()  # one count over both engines, and the same end
        assert numbers == list(range(len(numbers)))
        assert whole.view.blocks == follower.view.blocks
        whole.close()


async def test_metrics_count_messages(tmp_path: Path) -> None:
    async with followed(tmp_path) as (serving, follower, server):
        await ask(server, "a" * 200)
        await follows(serving, follower, set(blocks_of("a" * 200)))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.addresses.http_port}") as client:
            text = (await client.get("/metrics")).text
        figures = dict(line.split() for line in text.splitlines() if line.startswith("specdec_kv_event"))
        assert float(figures["specdec_kv_event_messages_total"]) == 2.0  # the beginning, and one step's
        assert float(figures["specdec_kv_event_overflows_total"]) == 0.0
        assert float(figures["specdec_kv_event_messages_replayed_total"]) >= 2.0


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "server.kv_events", raising=False)
    Serving(make_config(), lambda _: FakeTokenizer())  # without events it is not missed
    events = KvEventsConfig(endpoint="tcp://127.0.0.1:5557")
    with pytest.raises(ConfigError, match=r"zmq.*pip install '\.\[kv-events\]'"):
        Serving(make_config(kv_events=events), lambda _: FakeTokenizer())
