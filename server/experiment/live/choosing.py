"""The arm of a request: by key or by block of time; and the switching of the engine between blocks."""

from __future__ import annotations

import asyncio
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b

from server.auth.principal import Principal
from server.engine_client import EngineClient
from server.errors import DraftNotSwappedError, SwapUnderWayError
from server.experiment.assignment import BUCKETS, Split, TimeBlocks, digest
from server.experiment.config import Unit
from server.experiment.live.plan import EngineSettings
from server.experiment.records import NO_BLOCK, Choice
from specdec.config import WeightDtype
from specdec.core.types import Request
from specdec.errors import EngineDeadError, RequestError


def token_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian 32-bit integers. `array` is twice as fast as `struct`.

    Raises:
        OverflowError: an id is negative or exceeds 32 bits.
    """
    numbers = array("I", list(ids))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unit_key(unit: Unit, principal: Principal, request: Request) -> str | None:
    """The key of a request, scoped to its tenant; None if it has none (no session, no user).

    A prompt's key is BLAKE2b (16 bytes, in hex) of its token ids as little-endian 32-bit integers.
    """
    if unit == "request":
        return principal.scoped(request.request_id)
    if unit == "session":
        return principal.scoped(request.session) if request.session else None
    if unit == "user":
        return principal.name or None
    return blake2b(token_bytes(request.prompt_ids), digest_size=16).hexdigest()


class KeyChooser:
    """Modes `hash` and `aa`: every key has one fixed arm."""

    def __init__(self, salt: str, unit: Unit, weights: Mapping[str, float], share: float) -> None:
        self._salt, self._unit, self._split = salt, unit, Split(weights, share)

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The arm of the key's bucket; None also for a request without key."""
        key = unit_key(self._unit, principal, request)
        if key is None:
            return None
        found = digest(self._salt, key)
        arm = self._split.arm(int.from_bytes(found) % BUCKETS)
        if arm is None:
            return None
        return Choice(arm, "" if self._unit == "request" else found.hex())


class BlockChooser:
    """Mode `switchback`: the arm of the current block. With ``waits_for_engine``, requests are marked `warm_up` until
    the engine is switched for the block."""

    def __init__(self, blocks: TimeBlocks, now: Callable[[], float], *, waits_for_engine: bool = False) -> None:
        self.blocks = blocks
        self._now, self._waits = now, waits_for_engine
        self._enter(NO_BLOCK, "")

    def settled(self, block: int, now: float) -> None:
        """The engine is ready for ``block`` since ``now``."""
        self._enter(block, self.blocks.arm_of(block))
        self._settled_s = now

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        now = self._now()
        block = self.blocks.at(now)
        if block != self._block:
            self._enter(block, self.blocks.arm_of(block))
        return Choice(self._arm, block=block, warm_up=self.blocks.is_washed_out(now, self._settled_s))

    def _enter(self, block: int, arm: str) -> None:
        self._block, self._arm = block, arm
        self._settled_s = math.inf if self._waits else 0.0


_RETRY_S = 0.5  # between attempts while the engine restarts or an operator's draft model loads


class EngineSwitch:
    """Switches the engine at the beginning of each block. `stop` restores the original draft model
    if the arms name one. If a switch fails, ``on_error`` is called once and the engine stays as it is.

    Belongs to one event loop. ``now`` is Unix time, as in ``chooser``.
    """

    def __init__(
        self,
        client: EngineClient,
        settings: Mapping[str, EngineSettings],
        chooser: BlockChooser,
        now: Callable[[], float],
        on_error: Callable[[str], None],
    ) -> None:
        self._client, self._settings, self._chooser = client, settings, chooser
        self._now, self._on_error = now, on_error
        self._before: tuple[str | None, WeightDtype | None] = client.draft_setting
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="experiment-switch")

    async def stop(self) -> None:
        """End, and restore the original draft model if the arms name one; waits for a load or a restart in progress.

        Raises:
            RequestError: it cannot be restored.
        """
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        # An operator or another experiment may change a draft model that no arm names.
        while any("draft" in arm.names for arm in self._settings.values()):
            try:
                await self._draft(*self._before)
                return
            except (EngineDeadError, SwapUnderWayError):  # a restart has the draft model of the last block
                if self._client.engine.state.is_final:
                    raise
                await asyncio.sleep(_RETRY_S)

    def abandon(self) -> None:
        """End at once, without restoring the engine."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        blocks = self._chooser.blocks
        while not self._stopping.is_set():
            block = blocks.at(self._now())
            try:
                await self._apply(self._settings[blocks.arm_of(block)])
            except (EngineDeadError, SwapUnderWayError):
                await self._pause(_RETRY_S)
                continue
            except RequestError as error:
                self._on_error(f"the engine cannot be switched: {error}")
                return
            if blocks.at(self._now()) == block:  # false if the switch took longer than the block
                self._chooser.settled(block, self._now())
                await self._pause(max(0.0, blocks.begin_of(block + 1) - self._now()))

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
            head = self._client.info.head
            await self._client.swap_draft(draft, dtype)
            if self._client.draft_setting != (draft, dtype):
                if head:
                    await self._client.swap_draft(head)
                raise DraftNotSwappedError(f"engine.draft: {draft} is a feature head; an arm takes draft models only")
