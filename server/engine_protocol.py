"""What the serving side needs of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from specdec.types import EngineInfo, EngineLoad, Request, RequestEvent, StepTrace

# (what is being done, units done, units in all); a total of 0 means the size is not known
ProgressListener = Callable[[str, int, int], None]


class EngineLike(Protocol):
    """An engine as its process drives it, from one thread."""

    def submit(self, request: Request) -> None:
        """Queue ``request``.

        Raises:
            RequestError: it is refused; the engine is as before.
        """

    def abort(self, request_id: str) -> bool:
        """End a request now, its memory free on return; its unfinished samples' Finished come with the next `step`."""

    def step(self) -> list[RequestEvent]:
        """Run one step; empty when idle. An exception means that the engine is broken."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def info(self) -> EngineInfo:
        """What the engine is."""

    def load(self) -> EngineLoad:
        """How busy it is."""

    def trace(self, limit: int) -> list[StepTrace]:
        """The last ``limit`` steps, or as many as are kept; newest last."""

    def close(self) -> None:
        """End every request and let go of resources."""
