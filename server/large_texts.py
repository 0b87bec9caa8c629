"""Large texts: refused if no prompt can hold them, else encoded one at a time in a thread of low priority."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from specdec.errors import PromptTooLongError, QueueFullError

T = TypeVar("T")

LARGE_CHARACTERS = 1 << 14  # encoding takes about 10 ms
MOST_CHARACTERS = 1 << 26  # of all waiting texts; encoding takes about 40 s
_NICENESS = 10
_FIRST_RETRY_S = 1.0


class TextTooLongError(PromptTooLongError):
    """A text too long for any prompt. ``got`` is the least number of tokens that it can have."""

    def __init__(self, limit: int, got: int) -> None:
        super().__init__(limit, got)
        self.args = (f"prompt has at least {got} tokens, the limit is {limit}; shorten the prompt",)


class LargeTextQueueFullError(QueueFullError):
    """Too many large texts wait to be encoded."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(limit, retry_after_s)
        self.args = (
            f"queue is full: large texts of {limit} characters wait to be turned into tokens; retry in "
            f"{retry_after_s:.1f} s",
        )


def check_length(characters: int, longest_token: int, max_context: int) -> None:
    """Refuse a text that cannot fit into the context.

    Raises:
        TextTooLongError: it has too many tokens even if all are as long as the vocabulary's longest.
    """
    least = -(-characters // max(1, longest_token))
    if characters > LARGE_CHARACTERS and least > max_context - 1:
        raise TextTooLongError(max_context - 1, least)


def text_length(value: Any) -> int:
    """Characters of all strings in a JSON value."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return total


class LargeTexts:
    """Encodes large texts one at a time in a thread of low priority. The tokenizer must release the interpreter's lock.
    Belongs to one event loop."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = self._characters = 0
        self._last_s = _FIRST_RETRY_S

    async def run(self, characters: int, encode: Callable[[], T]) -> T:
        """Return ``encode()`` for a text of this length, after those before it. It is skipped if its caller has left.

        Raises:
            LargeTextQueueFullError: too many wait.
        """
        if self._waiting and self._characters + characters > MOST_CHARACTERS:
            raise LargeTextQueueFullError(self._characters, self._last_s * self._waiting)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "large-text", _yield_to_others)
        self._waiting += 1
        self._characters += characters
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._timed, encode)
        finally:
            self._waiting -= 1
            self._characters -= characters

    def close(self) -> None:
        """Start no further encoding."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, encode: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return encode()
        finally:
            self._last_s = time.monotonic() - began


def _yield_to_others() -> None:
    """Lower the thread's priority; on Linux each thread has its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
