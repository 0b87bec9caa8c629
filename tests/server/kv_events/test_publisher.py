"""The publisher alone: messages are ordered, replay fills gaps, and the publisher waits for no subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from server import kv_events
from server.kv_event_messages import pack_batch
from server.kv_events import KvEventPublisher
from specdec.config import KvEventsConfig
from specdec.core.cache_events import BlocksStored
from specdec.errors import ConfigError
from tests.server.kv_events.subscriber import Follower, decoded


def config(folder: Path, **more: Any) -> KvEventsConfig:
    return KvEventsConfig(endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay", **more)


@asynccontextmanager
async def published(settings: KvEventsConfig) -> AsyncIterator[tuple[KvEventPublisher, Follower]]:
    """A publisher, and a subscriber that has its first message."""
    publisher = KvEventPublisher(settings)
    publisher.open()
    assert settings.endpoint is not None
    follower = Follower(settings.endpoint, settings.replay_endpoint, settings.topic)
    try:
        await joined(publisher, follower)
        yield publisher, follower
    finally:
        follower.close()
        publisher.close()


async def joined(publisher: KvEventPublisher, follower: Follower) -> None:
    """Publish until the first message arrives, since ZeroMQ does not report when a subscription takes effect."""
    async with asyncio.timeout(10):
        while True:
            publisher.cleared()
            try:
                await follower.take(timeout_s=0.1)
                break
            except TimeoutError:
                continue


def block(number: int) -> bytes:
    return pack_batch([BlocksStored([number.to_bytes(16, "big")], None, [number] * 64, "")], "map")


async def test_messages_arrive_in_order_under_their_topic(tmp_path: Path) -> None:
    async with published(config(tmp_path, topic="kv@pod-1@model")) as (publisher, follower):
        for number in range(1, 20):
            publisher.publish(block(number))
        for number in range(1, 20):
            (event,) = await follower.take()
            assert event["block_hashes"] == [number]
        assert follower.topics == {b"kv@pod-1@model"}
        assert (follower.next, publisher.overflows) == (publisher.messages, 0)


async def test_a_replay_fills_a_gap(tmp_path: Path) -> None:
    async with published(config(tmp_path)) as (publisher, follower):
        for number in range(1, 4):
            publisher.publish(block(number))
        follower.next -= 1  # as if the last message had not come; it is taken twice, which does no harm
        follower.view.blocks.clear()
        before = publisher.replayed
        missed = await follower.catch_up()
        assert missed[-3:] == list(range(publisher.messages - 3, publisher.messages))
        assert set(follower.view.blocks) == {1, 2, 3}
        assert publisher.replayed == before + len(missed)
        assert await follower.catch_up() == []  # nothing is missing any more


async def test_stored_messages_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_REPLAYABLE", 5)
    async with published(config(tmp_path)) as (publisher, follower):
        for number in range(1, 40):
            publisher.publish(block(number))
        follower.next = 0
        assert await follower.catch_up() == list(range(publisher.messages - 5, publisher.messages))


async def test_a_long_replay_loses_no_message_and_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_QUEUED", 50)  # the reader's queue is full again and again
    async with published(config(tmp_path)) as (publisher, follower):
        for number in range(1, 1000):
            publisher.publish(block(number))
        turns, done = 0, False

        async def others() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(others())
        follower.next = 0
        came = await follower.catch_up()
        done = True
        await working
        assert came == list(range(publisher.messages))
        assert turns > 1000 / 32


async def test_a_slow_subscriber_misses_messages_that_others_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_QUEUED", 20)
    settings = config(tmp_path)
    async with published(settings) as (publisher, follower):
        assert settings.endpoint is not None
        with zmq.Context() as context, context.socket(zmq.SUB) as sleeper:  # subscribed, and reads nothing
            sleeper.setsockopt(zmq.RCVHWM, 1)
            sleeper.setsockopt(zmq.SUBSCRIBE, b"")
            sleeper.connect(settings.endpoint)
            while not sleeper.poll(0):
                publisher.cleared()
                await follower.take()
            before = publisher.messages
            for number in range(200):
                publisher.publish(
                    pack_batch([BlocksStored([number.to_bytes(16, "big")], None, [0] * 20_000, "")], "map")
                )
                (event,) = await follower.take()
                assert event["block_hashes"] == [number]  # immediately, and none is missing
            assert publisher.overflows >= 1
            read = 0
            while sleeper.poll(100):
                sleeper.recv_multipart()
                read += 1
            assert read < publisher.messages - before
            follower.next = before  # the slow subscriber can request a replay
            follower.view.blocks.clear()
            await follower.catch_up()
            assert set(follower.view.blocks) == set(range(200))


async def test_invalid_replay_requests_are_ignored(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with published(settings) as (publisher, follower):
        assert settings.replay_endpoint is not None
        context = zmq.asyncio.Context()
        bad = context.socket(zmq.DEALER)
        bad.connect(settings.replay_endpoint)
        for parts in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"more"]):
            await bad.send_multipart(parts)
        publisher.publish(block(1))
        follower.next = 0
        assert len(await follower.catch_up()) == publisher.messages
        assert not await bad.poll(50)
        context.destroy(linger=0)


async def test_oversized_requests_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, requested = config(tmp_path), []
    async with published(settings) as (publisher, _):
        monkeypatch.setattr(publisher, "_begin_replay", lambda parts: requested.append(parts[-1]))
        context = zmq.asyncio.Context()
        bad = context.socket(zmq.DEALER)
        assert settings.replay_endpoint is not None
        bad.connect(settings.replay_endpoint)
        await bad.send_multipart([b"", bytes(1 << 20)])
        async with asyncio.timeout(10):
            while not requested:
                await bad.send_multipart([b"", bytes(8)])
                await asyncio.sleep(0.05)
        assert set(requested) == {bytes(8)}
        context.destroy(linger=0)


async def test_a_client_that_does_not_read_its_replay_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_QUEUED", 1)
    settings = config(tmp_path)
    async with published(settings) as (publisher, follower):
        for number in range(40):  # more than the kernel keeps for a reader that is late
            publisher.publish(pack_batch([BlocksStored([number.to_bytes(16, "big")], None, [0] * 20_000, "")], "map"))
        context = zmq.asyncio.Context()
        slow = context.socket(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        assert settings.replay_endpoint is not None
        slow.connect(settings.replay_endpoint)
        await slow.send_multipart([b"", bytes(8)])
        async with asyncio.timeout(10):
            while not publisher._replays:
                await asyncio.sleep(0.01)
        follower.next = 0
        assert len(await follower.catch_up()) == publisher.messages
        assert len(publisher._replays) == 1  # the slow client's, which still waits
        context.destroy(linger=0)


async def test_endless_requests_do_not_block_the_loop(tmp_path: Path) -> None:
    class Endless:
        """A replay socket on which another bad request always waits."""

        taken = 0

        async def recv_multipart(self) -> list[bytes]:
            self.taken += 1
            assert self.taken < 10_000, "nobody else got a turn"
            return [b"client", b"not a number"]

    async with published(config(tmp_path)) as (publisher, _):
        endless = Endless()
        reading = asyncio.create_task(publisher._read_requests(endless))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for _ in range(5):
            before = endless.taken
            await asyncio.sleep(0)
            assert 0 < endless.taken - before <= 100
        reading.cancel()


async def test_it_can_connect_to_a_listening_router(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    router.bind(f"ipc://{tmp_path}/router")
    publisher = KvEventPublisher(KvEventsConfig(endpoint=f"ipc://{tmp_path}/router", connect=True))
    publisher.open()
    async with asyncio.timeout(10):
        while not await router.poll(50):
            publisher.publish(block(1))
    assert decoded((await router.recv_multipart())[2])[0]["block_hashes"] == [1]
    publisher.close()
    context.destroy(linger=0)


async def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        publisher = KvEventPublisher(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match=rf"server\.kv_events\.endpoint.*{port}.*in use"):
            publisher.open()
        publisher.close()
