"""Operators' commands that wait for the engine's answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from server.admin_errors import DraftNotSwappedError, NotAdministeredError, SwapUnderWayError
from server.request_errors import unpack_error
from specdec.errors import RequestError

_KNOWN: dict[str, type[RequestError]] = {
    e.reason: e for e in (DraftNotSwappedError, NotAdministeredError, SwapUnderWayError)
}


class AdminCalls:
    """Futures by the number that the engine is given in place of the caller."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[Any], Any]]] = {}
        self._numbers = itertools.count(1)

    def open(self, read: Callable[[Any], Any]) -> tuple[int, asyncio.Future[Any]]:
        """A number and the future of its answer, which raises a `RequestError` where there will be none.

        ``read`` makes the future's result of the answer; it is called even if nobody waits any more.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, read)
        return number, future

    def answer(self, number: int, error: Sequence[Any] | None, result: Any) -> None:
        """Hand the engine's answer to who waits for it, if anybody still does."""
        found = self._waiting.pop(number, None)
        if found is None:
            return
        future, read = found
        if error is None:
            result = read(result)
            if not future.done():
                future.set_result(result)
        elif not future.done():
            known = _KNOWN.get(error[0])
            future.set_exception(unpack_error(error) if known is None else known(error[1]))

    def fail_all(self, error: RequestError) -> None:
        """End every call with ``error``."""
        while self._waiting:
            _, (future, _) = self._waiting.popitem()
            if not future.done():
                future.set_exception(error)
