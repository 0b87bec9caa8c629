"""A router's use of KV events: it follows them, and requests the missed ones again."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import zmq
import zmq.asyncio

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
FIELDS = {"BlockStored": STORED, "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}


def decoded(payload: bytes) -> list[dict[str, Any]]:
    """Return the events of a message by name, in either encoding."""
    time_s, events, rank = msgpack.unpackb(payload)
    assert isinstance(time_s, float)
    assert rank == 0
    return [
        event if isinstance(event, dict) else {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=False))}
        for event in events
    ]


class CacheView:
    """The blocks that the events report: by hash, their tokens and the parent hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[tuple[int, ...], int | None]] = {}

    def apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for found in event["block_hashes"]:
                    del self.blocks[found]
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for place, found in enumerate(event["block_hashes"]):
            assert found not in self.blocks
            self.blocks[found] = (tuple(event["token_ids"][place * size : (place + 1) * size]), parent)
            parent = found


class Follower:
    """Subscribed to ``endpoint``; requests missed messages from ``replay``."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(endpoint)
        self._replay = replay
        self.view, self.next, self.topics = CacheView(), 0, set[bytes]()

    async def take(self, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """The next message's events, after applying the missed ones."""
        topic, number_bytes, payload = await asyncio.wait_for(self._sub.recv_multipart(), timeout_s)
        number, events = int.from_bytes(number_bytes, "big"), decoded(payload)
        self.topics.add(topic)
        if number > self.next and self._replay is not None:
            await self.catch_up()
        if number >= self.next:
            self.view.apply(events)
            self.next = number + 1
        return events

    async def catch_up(self) -> list[int]:
        """Take all stored messages from the first missed number; returns those received."""
        assert self._replay is not None
        came = []
        with self._context.socket(zmq.DEALER) as asking:
            asking.connect(self._replay)
            await asking.send_multipart([b"", self.next.to_bytes(8, "big")])
            while (parts := await asyncio.wait_for(asking.recv_multipart(), 10.0))[1] != b"\xff" * 8:
                number = int.from_bytes(parts[1], "big")
                assert number >= self.next
                self.view.apply(decoded(parts[2]))
                self.next = number + 1
                came.append(number)
        return came

    def close(self) -> None:
        self._context.destroy(linger=0)
