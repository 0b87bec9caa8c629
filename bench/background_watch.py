"""Something that looks at a run beside it, for as long as that lasts."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class BackgroundWatch:
    """Use as ``async with`` around the run; `_watch` goes on beside it and is cancelled behind it."""

    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name=type(self).__name__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None  # set on entering
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        raise NotImplementedError
