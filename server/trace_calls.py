"""Reads of the engine's decision trace that wait for its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from server.request_errors import GenerationFailedError
from server.wire import unpack_trace
from specdec.errors import RequestError
from specdec.types import StepTrace

DEFAULT_STEPS = 50
MAX_STEPS = 1024
LIMIT_RULE = f"must lie in 1..{MAX_STEPS}"


class TraceCalls:
    """Futures by the number that the engine is given in place of the caller."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[list[StepTrace]]] = {}
        self._numbers = itertools.count(1)

    def open(self) -> tuple[int, asyncio.Future[list[StepTrace]]]:
        """A number and the future of its answer, which raises a `RequestError` where there will be none."""
        number = next(self._numbers)
        future: asyncio.Future[list[StepTrace]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        # A caller that went away cancelled it; then nobody waits.
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return number, future

    def answer(self, number: int, steps: Sequence[Any] | None) -> None:
        """Hand the engine's answer to who waits for it, if anybody does; None: the engine could not tell."""
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if steps is None:
            future.set_exception(GenerationFailedError("INTERNAL", "the engine could not tell its trace"))
        else:
            future.set_result([unpack_trace(parts) for parts in steps])

    def fail_all(self, error: RequestError) -> None:
        """End every read with ``error``."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(error)
