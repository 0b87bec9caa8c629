"""Makes the engine what each block of a switchback wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from server.engine_client import EngineClient
from server.experiment.live.blocks import Blocks
from server.experiment.live.engine_settings import EngineSettings
from specdec.config import WeightDtype
from specdec.errors import EngineDeadError, RequestError

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
