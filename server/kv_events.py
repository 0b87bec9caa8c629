"""What the prefix cache holds, published over ZeroMQ for routers that send a prompt where its beginning is cached.

Imported only where it is asked for: needs the `kv-events` extra.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import zmq

from server.interfaces import KvEventCounts
from server.kv_event_messages import pack_cleared
from specdec.config import KvEventsConfig
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_QUEUED = 10_000  # messages that wait for one subscriber
_AT_ONCE = 32  # messages replayed, or requests taken, between two turns of the event loop
_FULL_WAIT_S = 0.02
_GIVE_UP_S = 30.0
_MAX_REPLAYS = 8
_LINGER_MS = 100
_MOST_ASKED_BYTES = 4096  # of what subscribers send: topics, numbers
_BAD_REQUEST = "a replay request must be an empty frame and 8 bytes, the first number wanted; it is left unanswered"


_REPLAYABLE = 10_000  # messages kept for replay, vLLM's default


class KvEventPublisher:
    """Publishes the messages of one engine and sends past ones again. Belongs to one event loop, and never waits in it.

    A message is ``topic, number (8 bytes, big-endian), payload``. A subscriber that misses numbers asks the replay
    socket, from a DEALER, with ``"", number`` for all from a number on; it gets ``"", number, payload`` of each that is
    still kept, and at last the number -1 with nothing. (A REQ socket, which vLLM's example has, reads the first only.)
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self.form = config.format
        self.counts = KvEventCounts()
        self._config = config
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_REPLAYABLE)
        self._number = 0
        self._context = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._replays: set[asyncio.Task[None]] = set()
        self._later: asyncio.Handle | None = None  # to take more requests

    def open(self) -> None:
        """Bind or connect the sockets.

        Raises:
            ConfigError: an address can not be had.
        """
        config = self._config
        assert config.endpoint is not None  # who has none makes no publisher
        pub = self._pub = self._socket(zmq.PUB)
        pub.setsockopt(zmq.XPUB_NODROP, 1)  # a full queue is told: `publish` decides
        _attach(pub.connect if config.connect else pub.bind, "endpoint", config.endpoint)
        if config.replay_endpoint is not None:
            router = self._router = self._socket(zmq.ROUTER)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is told, not dropped from
            _attach(router.bind, "replay_endpoint", config.replay_endpoint)
            asyncio.get_running_loop().add_reader(int(router.getsockopt(zmq.FD)), self._take_requests)

    def publish(self, payload: bytes) -> None:
        """Send one message to all subscribers; those whose queues are full miss it."""
        pub = self._pub
        if pub is None:
            return
        number, self._number = self._number, self._number + 1
        self._kept.append((number, payload))
        self.counts.messages += 1
        parts = [self._topic, number.to_bytes(8, "big"), payload]
        if self._sent(parts):
            return
        pub.getsockopt(zmq.EVENTS)  # notes what subscribers have read meanwhile, as sending does now and then
        if self._sent(parts):
            return
        self.counts.overflows += 1  # a queue has just become full: the others get it all the same
        pub.setsockopt(zmq.XPUB_NODROP, 0)
        self._sent(parts)
        pub.setsockopt(zmq.XPUB_NODROP, 1)

    def cleared(self) -> None:
        """The engine began or ended: nothing is cached."""
        self.publish(pack_cleared(self.form))

    def close(self) -> None:
        """Close the sockets; what slow subscribers have not read is dropped."""
        for task in self._replays:
            task.cancel()
        if self._router is not None:
            asyncio.get_running_loop().remove_reader(int(self._router.getsockopt(zmq.FD)))
        self._pub = self._router = None
        self._context.destroy(linger=_LINGER_MS)

    def _sent(self, parts: list[bytes]) -> bool:
        assert self._pub is not None  # `publish` saw to it
        try:
            self._pub.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, _QUEUED)
        made.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)  # who sends more is cut off before it is read
        made.setsockopt(zmq.IPV6, 1)
        return made

    def _take_requests(self) -> None:
        """Begin what was asked for. The socket's descriptor tells of a change only, so all that came is taken; in
        parts, as there may be no end of it."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        router = self._router
        for _ in range(_AT_ONCE):
            if router is None or not int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            try:
                parts = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._begin_replay(parts)
        self._later = asyncio.get_running_loop().call_soon(self._take_requests)

    def _begin_replay(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or parts[1] or len(parts[2]) != 8:
            _LOG.warning(_BAD_REQUEST)
            return
        if len(self._replays) >= _MAX_REPLAYS:
            _LOG.warning("%d replays are running; another one is left unanswered", _MAX_REPLAYS)
            return
        first = int.from_bytes(parts[2], "big")
        task = asyncio.create_task(self._replay(parts[0], [kept for kept in self._kept if kept[0] >= first]))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _replay(self, client: bytes, kept: Iterable[tuple[int, bytes]]) -> None:
        try:
            for at, (number, payload) in enumerate(kept):
                await self._answer(client, number.to_bytes(8, "big"), payload)
                self.counts.replayed += 1
                if at % _AT_ONCE == _AT_ONCE - 1:
                    await self._let_others(0.0)
            await self._answer(client, _END, b"")
        except (zmq.ZMQError, TimeoutError) as error:
            _LOG.warning("a replay of KV events broke off: %s", error or "the client does not read")
        finally:
            self._take_requests()

    async def _let_others(self, seconds: float) -> None:
        """Sending may have taken the descriptor's notice of requests that came meanwhile."""
        await asyncio.sleep(seconds)
        self._take_requests()

    async def _answer(self, client: bytes, number: bytes, payload: bytes) -> None:
        """Wait while the client's queue is full.

        Raises:
            TimeoutError: it does not read.
            zmq.ZMQError: it is gone.
        """
        async with asyncio.timeout(_GIVE_UP_S):
            while self._router is not None:
                try:
                    self._router.send_multipart([client, b"", number, payload], zmq.NOBLOCK)
                    return
                except zmq.Again:
                    await self._let_others(_FULL_WAIT_S)


def _attach(attach: Callable[[str], object], field: str, address: str) -> None:
    try:
        attach(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"server.kv_events.{field}: {address} can not be used ({error})") from None
