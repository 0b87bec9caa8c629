"""The engine process as the front end sees it."""

from __future__ import annotations

import asyncio
from enum import StrEnum


class EngineState(StrEnum):
    """``FAILED``: it will not come back by itself. ``CLOSED``: it was told to end."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def is_final(self) -> bool:
        """Whether no other state follows."""
        return self in (EngineState.FAILED, EngineState.CLOSED)


class StateBoard:
    """The state in force, and a queue of what it becomes for each who watches."""

    def __init__(self) -> None:
        self._state = EngineState.LOADING
        self._watchers: list[asyncio.Queue[EngineState]] = []

    @property
    def state(self) -> EngineState:
        """The state in force."""
        return self._state

    def become(self, state: EngineState) -> None:
        """Change the state; a final one stays."""
        if state == self._state or self._state.is_final:
            return
        self._state = state
        for watcher in self._watchers:
            watcher.put_nowait(state)

    def watch(self) -> asyncio.Queue[EngineState]:
        """A queue that holds the state in force and then gets every further one."""
        watcher: asyncio.Queue[EngineState] = asyncio.Queue()
        watcher.put_nowait(self._state)
        self._watchers.append(watcher)
        return watcher

    def unwatch(self, watcher: asyncio.Queue[EngineState]) -> None:
        """Stop filling ``watcher``."""
        self._watchers.remove(watcher)
