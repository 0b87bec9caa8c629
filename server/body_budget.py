"""Limits over all callers: the memory of request bodies in flight, and connections."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import BodiesFullError

BODIES_IN_FLIGHT_BYTES = 256 << 20  # of all calls together, or 4 bodies of the longest that is allowed
OWN_BYTES = 1 << 16  # of each body, which take no room: ordinary requests do not wait for large ones
WAIT_S = 5.0  # how long a call waits for room before it is refused
SLOW_S = 5.0  # a body that arrives for longer is cut off if others wait for room
_LOOK_S = 0.5  # between looks for slow bodies while somebody waits
_TRIM_AFTER_S = 2.0  # from the end of a large body to the return of its memory, when its readers are done too
_LARGE_BYTES = 1 << 18  # bodies from this size on leave memory behind in the C library when they are freed

MAX_CONNECTIONS = 4096  # of one port
_OTHER_DESCRIPTORS = 128  # kept for files, the engine's pipes and its restart


def connection_limit() -> int:
    """Return how many connections a port may have: half of the descriptors that the process may open, at most."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(16, (descriptors - _OTHER_DESCRIPTORS) // 2))


class Body:
    """The room of one call's body."""

    def __init__(self, budget: BodyBudget, cut_off: Callable[[], None]) -> None:
        self._budget, self.cut_off = budget, cut_off
        self.size = 0  # bytes
        self.held = 0  # bytes of the budget
        self.began_s = asyncio.get_running_loop().time()

    async def reserve(self, size: int) -> None:
        """Take room for ``size`` more bytes, waiting for it if necessary.

        Raises:
            BodiesFullError: none became free in `WAIT_S` seconds.
        """
        before, self.size = self.size, self.size + size
        room = self._budget.room(self.size) - self._budget.room(before)
        if room:
            await self._budget.take(room)
            self.held += room

    def arrived(self, size: int) -> None:
        """The body is complete: keep room for its ``size`` bytes only."""
        self._budget.complete(self, self._budget.room(size))


class BodyBudget:
    """Shares ``limit`` bytes among bodies, first come, first served."""

    def __init__(
        self, limit: int = BODIES_IN_FLIGHT_BYTES, trim: Callable[[], None] = lambda: None, own_bytes: int = OWN_BYTES
    ) -> None:
        """trim: called in a thread after large bodies, to return the memory that they leave behind. own_bytes: of each
        body, which do not count."""
        self.limit, self.used = limit, 0  # bytes
        self._own_bytes = own_bytes
        self._trim = trim
        self._trim_timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._arriving: dict[Body, None] = {}  # oldest first

    @contextmanager
    def body(self, cut_off: Callable[[], None]) -> Iterator[Body]:
        """A body's room until its call ends. ``cut_off`` ends the reading of a slow body."""
        body = Body(self, cut_off)
        self._arriving[body] = None
        try:
            yield body
        finally:
            large = body.held >= _LARGE_BYTES
            self.complete(body, 0)
            if large:
                self._trim_later()

    def complete(self, body: Body, size: int) -> None:
        """``body`` arrives no longer and keeps ``size`` bytes."""
        self._arriving.pop(body, None)
        self.used -= body.held - size
        body.held = size
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and self.used + self._waiting[0][1] <= self.limit:
            place, wanted = self._waiting.popleft()
            self.used += wanted
            place.set_result(None)

    def room(self, size: int) -> int:
        """Bytes of the budget that a body of ``size`` bytes takes."""
        return max(0, size - self._own_bytes)

    async def take(self, size: int) -> None:
        """As `Body.reserve`."""
        if not self._waiting and self.used + size <= self.limit:
            self.used += size
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, size))
        try:
            async with asyncio.timeout(WAIT_S):
                while not place.done():
                    self._cut_off_slow()
                    await asyncio.wait([place], timeout=_LOOK_S)
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
        """End the oldest body that still arrives, if it is slow and holds room."""
        slow_s = asyncio.get_running_loop().time() - SLOW_S
        for body in self._arriving:
            if body.began_s > slow_s:
                return
            if body.held:
                del self._arriving[body]  # it is cut off once
                body.cut_off()
                return

    def _trim_later(self) -> None:
        if self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._run_trim)

    def _run_trim(self) -> None:
        self._trim_timer = None
        asyncio.get_running_loop().run_in_executor(None, self._collect_and_trim)

    def _collect_and_trim(self) -> None:
        gc.collect(1)  # of the young objects only: a full collection would interrupt the streams
        self._trim()
