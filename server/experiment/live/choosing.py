"""The arm of a request: by key or by block of time; and the switching of the engine between blocks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b

import numpy as np

from server.auth.principal import Principal
from server.engine_client import EngineClient
from server.errors import DraftNotSwappedError, SwapUnderWayError
from server.experiment.assignment import Split, bucket, digest
from server.experiment.config import Unit
from server.experiment.live.plan import EngineSettings
from server.experiment.records import NO_BLOCK, Choice
from specdec.config import WeightDtype
from specdec.core.types import Request
from specdec.errors import EngineDeadError, RequestError


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
    ids = np.asarray(request.prompt_ids, "<u4").tobytes()
    return blake2b(ids, digest_size=16).hexdigest()


class KeyChooser:
    """Modes `hash` and `aa`: every key has one fixed arm."""

    def __init__(self, salt: str, unit: Unit, weights: Mapping[str, float], share: float) -> None:
        self._salt, self._unit, self._split = salt, unit, Split(weights, share)

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The arm of the key's bucket; None also for a request without key."""
        key = unit_key(self._unit, principal, request)
        if key is None:
            return None
        arm = self._split.arm(bucket(self._salt, key))
        if arm is None:
            return None
        return Choice(arm, "" if self._unit == "request" else digest(self._salt, key).hex())


class BlockChooser:
    """Mode `switchback`: all requests of a block of ``block_s`` seconds have one arm, by the bucket of
    ``block:NUMBER``, with equal chances. It is predictable only with the salt, and stable across restarts.

    Requests within ``washout_s`` of a block's begin run beside those of the block before and are marked `warm_up`. With
    ``waits_for_engine``, so are all until ``washout_s`` after the engine is switched for the block, and all while the
    engine has lost the block's settings. ``now`` is Unix time.
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
        self._block_s, self._washout_s = block_s, washout_s
        self._now, self._waits = now, waits_for_engine
        self._settled_block, self._settled_s = NO_BLOCK, 0.0
        self._holds: Callable[[], bool] = lambda: True

    @property
    def block(self) -> int:
        return int(self._now() // self._block_s)

    def left_s(self, block: int) -> float:
        return max(0.0, (block + 1) * self._block_s - self._now())

    def arm_of(self, block: int) -> str:
        arm = self._split.arm(bucket(self._salt, f"block:{block}"))
        assert arm is not None  # every bucket takes part
        return arm

    def settled(self, block: int, holds: Callable[[], bool]) -> None:
        """The engine is ready for ``block`` from now on, as long as ``holds`` returns True."""
        self._settled_block, self._settled_s, self._holds = block, self._now(), holds

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        now = self._now()
        block = int(now // self._block_s)
        begun_s = block * self._block_s
        if self._waits:
            begun_s = self._settled_s if block == self._settled_block and self._holds() else math.inf
        return Choice(self.arm_of(block), block=block, warm_up=now - begun_s < self._washout_s)


_RETRY_S = 0.5  # between attempts while the engine restarts or an operator's draft model loads


class EngineSwitch:
    """Switches the engine at the beginning of each block. `stop` restores the original draft model
    if the arms name one. If a switch fails, ``on_error`` is called once and the engine stays as it is.

    Belongs to one event loop.
    """

    def __init__(
        self,
        client: EngineClient,
        settings: Mapping[str, EngineSettings],
        chooser: BlockChooser,
        on_error: Callable[[str], None],
    ) -> None:
        self._client, self._settings, self._chooser, self._on_error = client, settings, chooser, on_error
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
            except (EngineDeadError, SwapUnderWayError):  # a restart tries the draft model of the last block
                if self._client.engine.state.is_final:
                    raise
                await asyncio.sleep(_RETRY_S)

    def abandon(self) -> None:
        """End at once, without restoring the engine."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        chooser = self._chooser
        while not self._stopping.is_set():
            block = chooser.block
            settings = self._settings[chooser.arm_of(block)]
            try:
                if "draft" in settings.names:
                    await self._draft(settings.draft, settings.draft_dtype)
                if settings.flush_cache:
                    await self._client.flush_cache()
            except (EngineDeadError, SwapUnderWayError):
                await self._pause(_RETRY_S)
                continue
            except RequestError as error:
                self._on_error(f"the engine cannot be switched: {error}")
                return
            if chooser.block == block:  # false if the switch took longer than the block
                chooser.settled(block, partial(self._holds, settings, self._client.engine.config.draft_head))
                await self._pause(chooser.left_s(block))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _holds(self, settings: EngineSettings, head: str | None) -> bool:
        """Whether the engine has the arm's draft model, and still ``head``: a restart may have refused the draft, or an
        operator swapped it."""
        now = (*self._client.draft_setting, self._client.engine.config.draft_head)
        return "draft" not in settings.names or now == (settings.draft, settings.draft_dtype, head)

    async def _draft(self, draft: str | None, dtype: WeightDtype | None) -> None:
        if self._client.draft_setting != (draft, dtype):
            head = self._client.info.head
            await self._client.swap_draft(draft, dtype)
            if self._client.draft_setting != (draft, dtype):
                if head:
                    await self._client.swap_draft(head)
                raise DraftNotSwappedError(f"engine.draft: {draft} is a feature head; an arm takes draft models only")
