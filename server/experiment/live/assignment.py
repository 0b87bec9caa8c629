"""Which arm a request gets: by its key, by a block of time, or with a shadow; and the engine's switching."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple, Protocol

from server.auth.principal import Principal
from server.engine_client import EngineClient
from server.experiment.config import BUCKETS, Split, Unit, bucket, digest
from server.experiment.live.plan import EngineSettings
from server.experiment.records import NO_BLOCK
from specdec.config import WeightDtype
from specdec.errors import EngineDeadError, RequestError
from specdec.types import Request


def token_bytes(ids: Iterable[int]) -> bytes:
    """Little-endian 32-bit numbers. A list's are taken in one go: twice as fast as by `struct`, or from a tuple.

    Raises:
        OverflowError: an id is below 0 or takes more than 32 bits.
    """
    numbers = array("I", list(ids))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class Choice(NamedTuple):
    """``key``: whom the arm sticks to, not to be read back from it; empty where it is the request. ``block``: of a
    switchback. ``warm_up``: too near to the block before. ``shadowed``: another arm gets the request too."""

    arm: str
    key: str = ""
    block: int = NO_BLOCK
    warm_up: bool = False
    shadowed: bool = False


def unit_key(unit: Unit, principal: Principal, request: Request) -> str | None:
    """The key of a request, no other tenant's; None where it has none: no session, no user.

    A prompt's key is BLAKE2b (16 bytes, in hex) of its token ids as little-endian 32-bit numbers.
    """
    if unit == "request":
        return principal.scoped(request.request_id)
    if unit == "session":
        return principal.scoped(request.session) if request.session else None
    if unit == "user":
        return principal.name or None
    return blake2b(token_bytes(request.prompt_ids), digest_size=16).hexdigest()


class Chooser(Protocol):
    """One per running experiment."""

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The request's arm; None: it takes no part."""


class KeyChooser:
    """Modes `hash` and `aa`: every key has one arm, always."""

    def __init__(self, salt: str, unit: Unit, weights: Mapping[str, float], share: float) -> None:
        self._salt, self._unit, self._split = salt, unit, Split(weights, share)

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """By the key's bucket; None also for a request without a key."""
        key = unit_key(self._unit, principal, request)
        if key is None:
            return None
        found = digest(self._salt, key)
        arm = self._split.arm(int.from_bytes(found) % BUCKETS)
        if arm is None:
            return None
        return Choice(arm, "" if self._unit == "request" else found.hex())


class ShadowChooser:
    """Mode `shadow`: everybody gets the control; those whose keys fall into the share are sent to both arms."""

    def __init__(self, salt: str, unit: Unit, control: str, share: float) -> None:
        self._keys = KeyChooser(salt, unit, {control: 1.0}, share)

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The control; None outside of the share."""
        choice = self._keys.choose(principal, request)
        return None if choice is None else choice._replace(shadowed=True)


class Blocks:
    """Block floor(t / block_s) of Unix time t has the arm of the key ``block:NUMBER``, each arm with chance 1/2: known
    beforehand to who has the salt, to nobody else, and the same after a restart.

    A request belongs to the block it came in. Within ``washout_s`` of a block's begin, and while the engine is being
    changed for the block (where ``waits_for_engine``), it is marked as `warm_up`.
    """

    def __init__(
        self,
        salt: str,
        arms: Iterable[str],
        block_s: float,
        washout_s: float,
        now: Callable[[], float],
        *,
        waits_for_engine: bool = False,
    ) -> None:
        self._salt, self._split = salt, Split(dict.fromkeys(arms, 1.0))
        self._block_s, self._washout_s, self._now = block_s, washout_s, now
        self._waits = waits_for_engine
        self._block = -1
        self._arm = ""
        self._settled_s = float("inf") if waits_for_engine else 0.0

    def arm_of(self, block: int) -> str:
        """Whose block it is."""
        arm = self._split.arm(bucket(self._salt, f"block:{block}"))
        assert arm is not None  # every bucket is somebody's
        return arm

    def block_at(self, now: float) -> int:
        """The block of a moment."""
        return int(now // self._block_s)

    def begin_of(self, block: int) -> float:
        """When a block begins."""
        return block * self._block_s

    def settled(self, block: int, now: float) -> None:
        """The engine is what ``block`` wants, from ``now`` on."""
        self._enter(block)
        self._settled_s = now

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The arm of the block that runs."""
        now = self._now()
        block = self.block_at(now)
        if block != self._block:
            self._enter(block)
        begin = max(self.begin_of(block), self._settled_s)
        return Choice(self._arm, block=block, warm_up=now - begin < self._washout_s)

    def _enter(self, block: int) -> None:
        self._block, self._arm = block, self.arm_of(block)
        self._settled_s = float("inf") if self._waits else 0.0


_RETRY_S = 0.5


class EngineSwitch:
    """Runs from `start` to `stop`, which puts the draft model back that was there before. ``on_error`` is told once,
    when the engine can not be changed; it is then left as it is.

    Belongs to one event loop. ``now`` is Unix time, as ``blocks`` have it.
    """

    def __init__(
        self,
        client: EngineClient,
        settings: Mapping[str, EngineSettings],
        blocks: Blocks,
        now: Callable[[], float],
        on_error: Callable[[str], None],
    ) -> None:
        self._client, self._settings, self._blocks = client, settings, blocks
        self._now, self._on_error = now, on_error
        self._before: tuple[str | None, WeightDtype | None] = client.draft_setting
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with the block that runs."""
        self._task = asyncio.create_task(self._run(), name="experiment-switch")

    async def stop(self) -> None:
        """End, with the draft model that was there before; waits for one that is being loaded.

        Raises:
            RequestError: it can not be had any more.
        """
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._draft(*self._before)

    def abandon(self) -> None:
        """End at once, whatever the engine is then."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            block = self._blocks.block_at(self._now())
            try:
                await self._apply(self._settings[self._blocks.arm_of(block)])
            except EngineDeadError:
                await self._pause(_RETRY_S)  # it is being restarted
                continue
            except RequestError as error:
                self._on_error(f"the engine could not be switched: {error}")
                return
            if self._blocks.block_at(self._now()) == block:  # else it took as long as the block
                self._blocks.settled(block, self._now())
                await self._pause(max(0.0, self._blocks.begin_of(block + 1) - self._now()))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _apply(self, settings: EngineSettings) -> None:
        if "draft" in settings.names:
            await self._draft(settings.draft, settings.draft_dtype)
        if settings.flush_cache:
            await self._client.flush_cache()

    async def _draft(self, draft: str | None, dtype: WeightDtype | None) -> None:
        if self._client.draft_setting != (draft, dtype):
            await self._client.swap_draft(draft, dtype)
