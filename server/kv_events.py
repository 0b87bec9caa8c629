"""Publishes prefix cache events over ZeroMQ, for routers that send prompts to where their prefix is cached.

Needs the `kv-events` extra; imported only if events are configured.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from server.kv_event_messages import pack_batch
from specdec.config import KvEventsConfig
from specdec.core.cache_events import CacheCleared
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_QUEUED = 10_000  # messages queued for one subscriber
_AT_ONCE = 32  # messages replayed between two turns of the event loop
_FULL_WAIT_S = 0.02  # between two tries to send to a client whose queue is full
_GIVE_UP_S = 30.0  # after which a replay to a client that does not read ends
_MAX_REPLAYS = 8  # at a time
_LINGER_MS = 100  # for unsent messages at the end
_MAX_REQUEST_BYTES = 4096  # of a message that a subscriber sends
_BAD_REQUEST = "a replay request must be an empty frame and 8 bytes, the first number wanted; it is ignored"
_REPLAYABLE = 10_000  # messages kept for replay, vLLM's default


class KvEventPublisher:
    """Publishes the messages of one engine and replays past ones. Belongs to one event loop and never blocks it.

    A message is ``topic, number (8 bytes, big-endian), payload``. A subscriber that missed messages sends ``"",
    number`` from a DEALER socket to the replay socket. It gets ``"", number, payload`` for each kept message from that
    number on, then the number -1 with an empty payload. (A REQ socket, as in vLLM's example, reads the first only.)
    """

    _pub: zmq.Socket[bytes]  # from `open` to `close`

    def __init__(self, config: KvEventsConfig) -> None:
        self.messages = 0  # published; the number of the next one
        self.overflows = 0  # times a subscriber's queue was full; it misses messages until half of its queue is read
        self.replayed = 0  # messages sent again on request
        self._config = config
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_REPLAYABLE)
        self._context = zmq.Context()
        self._router: zmq.asyncio.Socket | None = None
        self._replays: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Bind or connect the sockets.

        Raises:
            ConfigError: an address cannot be used.
        """
        config = self._config
        assert config.endpoint is not None  # a publisher is made only with one
        pub = self._pub = self._socket(zmq.PUB)
        pub.setsockopt(zmq.XPUB_NODROP, 1)  # a full queue raises, and `publish` decides
        _attach(pub.connect if config.connect else pub.bind, "endpoint", config.endpoint)
        if config.replay_endpoint is not None:
            router = self._router = zmq.asyncio.Socket.from_socket(self._socket(zmq.ROUTER))
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue raises instead of dropping
            _attach(router.bind, "replay_endpoint", config.replay_endpoint)
            self._reading = asyncio.create_task(self._read_requests(router))

    def publish(self, payload: bytes) -> None:
        """Send a message to all subscribers; those whose queues are full miss it."""
        parts = [self._topic, self.messages.to_bytes(8, "big"), payload]
        self._kept.append((self.messages, payload))
        self.messages += 1
        if self._sent(parts):
            return
        self._pub.getsockopt(zmq.EVENTS)  # updates the queues by what subscribers have read
        if self._sent(parts):
            return
        self.overflows += 1  # a queue has become full; the other subscribers still get the message
        self._pub.setsockopt(zmq.XPUB_NODROP, 0)
        self._sent(parts)
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def cleared(self) -> None:
        """Publish that nothing is cached: an engine started or ended."""
        self.publish(pack_batch([CacheCleared()], self._config.format))

    def close(self) -> None:
        """Close the sockets; messages that slow subscribers have not read are dropped."""
        for task in (self._reading, *self._replays):
            if task is not None:
                task.cancel()
        if self._router is not None:
            self._router.close(_LINGER_MS)
        self._router = None
        self._context.destroy(linger=_LINGER_MS)

    def _sent(self, parts: list[bytes]) -> bool:
        try:
            self._pub.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, _QUEUED)
        made.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)  # a client that sends more is disconnected
        made.setsockopt(zmq.IPV6, 1)
        return made

    async def _read_requests(self, router: zmq.asyncio.Socket) -> None:
        """Start the requested replays."""
        while True:
            self._begin_replay(await router.recv_multipart())
            await asyncio.sleep(0)  # requests that wait already are read without a turn of the event loop

    def _begin_replay(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or parts[1] or len(parts[2]) != 8:
            _LOG.warning(_BAD_REQUEST)
            return
        if len(self._replays) >= _MAX_REPLAYS:
            _LOG.warning("%d replays are running; another request is ignored", _MAX_REPLAYS)
            return
        first = int.from_bytes(parts[2], "big")
        task = asyncio.create_task(self._replay(parts[0], [kept for kept in self._kept if kept[0] >= first]))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _replay(self, client: bytes, kept: Iterable[tuple[int, bytes]]) -> None:
        try:
            for at, (number, payload) in enumerate(kept):
                await self._answer(client, number.to_bytes(8, "big"), payload)
                self.replayed += 1
                if at % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
            await self._answer(client, _END, b"")
        except (zmq.ZMQError, TimeoutError) as error:
            _LOG.warning("a replay of KV events broke off: %s", error or "the client does not read")

    async def _answer(self, client: bytes, number: bytes, payload: bytes) -> None:
        """Send one replayed message; waits while the client's queue is full.

        Raises:
            TimeoutError: the client does not read.
            zmq.ZMQError: the client is gone.
        """
        async with asyncio.timeout(_GIVE_UP_S):
            while self._router is not None:
                try:
                    await self._router.send_multipart([client, b"", number, payload], zmq.NOBLOCK)
                    return
                except zmq.Again:
                    await asyncio.sleep(_FULL_WAIT_S)


def _attach(attach: Callable[[str], object], field: str, address: str) -> None:
    try:
        attach(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"server.kv_events.{field}: {address} cannot be used ({error})") from None
