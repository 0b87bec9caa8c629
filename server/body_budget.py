"""Limits over all callers: the memory of request bodies in flight, and connections."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice

from server.errors import BodiesFullError

_LOG = logging.getLogger(__name__)

BODIES_IN_FLIGHT_BYTES = 256 << 20  # of all calls of a port together, or 4 of the longest bodies
MAX_MESSAGE_BYTES = 16 << 20  # of one gRPC message or HTTP body
OWN_BYTES = 1 << 16  # of each body, which take no room: ordinary requests do not wait for large ones
WAIT_S = 5.0  # how long a call waits for room before it is refused
SLOW_S = 5.0  # a body that takes longer to arrive may be cut off for others
START_S = 1.0  # the start of a body, in which no speed is expected
_LOOK_S = 0.5  # between looks for slow bodies while a call waits for room
_READ_LOOK_S = 0.02  # between looks for late messages
PROMPT_LOOKS, SLOW_LOOKS = 2, 250  # looks after which a message is late; the second is for the oldest ones
_TRIM_AFTER_S = 2.0  # from the end of a large body to the return of its memory, when its readers are done too
_LARGE_BYTES = 1 << 18  # bodies from this size on leave memory behind in the C library when they are freed

MAX_CONNECTIONS = 4096  # of one port
MAX_DESCRIPTORS = 1 << 16  # soft limit to set, if the hard limit allows it
_OTHER_DESCRIPTORS = 128  # kept for files, the engine's pipes and its restart


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit on open files to the hard one, at most `MAX_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _LOG.warning("the limit on open files stays at %d: %s", soft, error)


def connection_limit() -> int:
    """Return how many connections a port may have: half of the descriptors that the process may open, at most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(16, (descriptors - _OTHER_DESCRIPTORS) // 2))


class Body:
    """The room of one call's body."""

    def __init__(self, budget: BodyBudget, cut_off: Callable[[], None], expected: int) -> None:
        self._budget, self.cut_off = budget, cut_off
        self._expected = expected  # bytes; 0: unknown
        self.size = 0  # bytes so far
        self.held = 0  # bytes of the budget
        self.began_s = asyncio.get_running_loop().time()  # to arrive, or again when it got room

    async def reserve(self, size: int) -> None:
        """Take room for ``size`` more bytes, waiting for it if necessary.

        The first of them that do not fit the body's own room take the room of all that it may have: bodies that wait
        for room piece by piece would wait for each other.

        Raises:
            BodiesFullError: none became free in `WAIT_S` seconds.
        """
        self.size += size
        if self._budget.room(self.size) > self.held:
            room = self._budget.room(max(self.size, self._expected)) - self.held
            await self._budget.take(room)
            self.held += room
            self.began_s = asyncio.get_running_loop().time()

    def arrived(self, size: int) -> None:
        """The body is complete: keep room for its ``size`` bytes only."""
        self._budget.complete(self, self._budget.room(size))

    def is_slow(self, now_s: float) -> bool:
        """Whether the body takes longer than `SLOW_S` at its speed since `START_S`."""
        return (now_s - self.began_s - START_S) * self._expected > SLOW_S * self.size


class BodyBudget:
    """Shares ``limit`` bytes among the bodies of one port, first come, first served."""

    def __init__(
        self,
        longest: int = MAX_MESSAGE_BYTES,
        trim: Callable[[], None] = lambda: None,
        limit: int | None = None,
        own_bytes: int = OWN_BYTES,
    ) -> None:
        """longest: bytes of a body, whose reader keeps no more. trim: called in a thread after large bodies, to return
        the memory that they leave behind. limit: default: `BODIES_IN_FLIGHT_BYTES`. own_bytes: of each body, which do
        not count."""
        self.longest = longest
        self.limit = max(BODIES_IN_FLIGHT_BYTES, 4 * longest) if limit is None else limit
        self.used = 0  # bytes
        self._own_bytes = own_bytes
        self._trim = trim
        self._trim_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._arriving: dict[Body, None] = {}  # oldest first

    @contextmanager
    def body(self, cut_off: Callable[[], None] = lambda: None, expected: int = 0) -> Iterator[Body]:
        """A body's room until its call ends. ``cut_off`` ends the reading of a slow body. expected: its bytes, or the
        most that it may have; 0: they are known when it has arrived."""
        body = Body(self, cut_off, min(expected, self.longest))
        self._arriving[body] = None
        try:
            yield body
        finally:
            large = body.held >= _LARGE_BYTES
            self.complete(body, 0)
            if large and self._trim_timer is None:
                self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._run_trim)

    def complete(self, body: Body, room: int) -> None:
        """``body`` is complete and keeps ``room`` bytes."""
        self._arriving.pop(body, None)
        self.used -= body.held - room
        body.held = room
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and self.used + self._waiting[0][1] <= self.limit:
            place, wanted = self._waiting.popleft()
            self.used += wanted
            place.set_result(None)

    def room(self, size: int) -> int:
        """Bytes of the budget that a body of ``size`` bytes takes."""
        return max(0, min(size, self.longest) - self._own_bytes)

    async def take(self, size: int) -> None:
        """As `Body.reserve`."""
        if not self._waiting and self.used + size <= self.limit:
            self.used += size
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, size))
        self._cut_off_slow()
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait([place])  # a cancelled task leaves ``place`` as it is
        except BaseException as error:
            if place.done():
                self.used -= size
            else:
                self._waiting.remove((place, size))
            self._serve_waiting()
            if isinstance(error, TimeoutError):
                raise BodiesFullError(WAIT_S) from None
            raise

    def _cut_off_slow(self) -> None:
        """End at most as many slow bodies as others wait for room, now and every `_LOOK_S` while they wait."""
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        slow = (body for body in self._arriving if body.held and body.is_slow(loop.time()))
        for body in list(islice(slow, len(self._waiting))):
            del self._arriving[body]  # it is cut off once
            body.cut_off()
        self._look_timer = loop.call_later(_LOOK_S, self._cut_off_slow)

    def _run_trim(self) -> None:
        self._trim_timer = None
        asyncio.get_running_loop().run_in_executor(None, self._collect_and_trim)

    def _collect_and_trim(self) -> None:
        gc.collect(1)  # of the young objects only: a full collection would interrupt the streams
        self._trim()


class MessageReads:
    """Places for gRPC messages while they arrive; each may take the memory of the longest message.

    gRPC does not say how much of a message has arrived, so calls that send nothing look like large messages.
    While more than three quarters of the places are taken, messages that are late are ended: the half that came first
    have long, and arrive under any load; the others have to be small or quick. So other calls soon find places.
    """

    def __init__(self, places: int) -> None:
        self._places, self._free = places, asyncio.Semaphore(places)
        self._reading: dict[asyncio.Timeout, int] = {}  # in the order of their start; each with the looks it has had
        self._look_timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for one message until it has arrived and has room.

        Raises:
            BodiesFullError: the message was late, or no place became free in `WAIT_S` seconds.
        """
        try:
            async with asyncio.timeout(WAIT_S) as read, self._free:
                read.reschedule(None)
                self._reading[read] = 0
                self._look_soon()
                try:
                    yield
                finally:
                    self._reading.pop(read, None)
        except TimeoutError:
            raise BodiesFullError(WAIT_S) from None

    def _look_soon(self) -> None:
        if self._look_timer is None and len(self._reading) > self._places * 3 // 4:
            self._look_timer = asyncio.get_running_loop().call_later(_READ_LOOK_S, self._look)

    def _look(self) -> None:
        """End late messages. Looks are counted, not seconds: the server itself may have been busy in these."""
        self._look_timer = None
        for rank, read in enumerate(list(self._reading)):
            self._reading[read] += 1
            if self._reading[read] > (SLOW_LOOKS if rank < self._places // 2 else PROMPT_LOOKS):
                del self._reading[read]
                read.reschedule(asyncio.get_running_loop().time())
        self._look_soon()
