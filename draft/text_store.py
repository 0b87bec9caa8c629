"""Bounded stores of earlier texts: one per session and one per salt, written a few tokens at a time."""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import TypeVar

from draft.lookups import Native
from specdec.core.types import Request

BREAK = -1  # token between two texts: no sequence holds it, so no match crosses it


class TextStore(Native):
    """At most ``limit`` tokens of text. Written half by half: a full half is kept until the next one is full."""

    def __init__(self, library: ctypes.PyDLL, limit: int) -> None:
        super().__init__(library, "store", limit)


class TextWriter(Native):
    """Writes a text to a store, except the parts that the store holds."""

    def __init__(self, library: ctypes.PyDLL, store: TextStore, tokens: array[int]) -> None:
        super().__init__(library, "writer", store, *tokens.buffer_info())
        self._store = store  # the native writer writes to it
        self._work, self.remaining = library.sd_writer_work, len(tokens)

    def work(self, budget: int) -> int:
        """Process at most ``budget`` tokens; returns their number."""
        before, self.remaining = self.remaining, self._work(self, budget)
        return before - self.remaining


Key = TypeVar("Key", bound=Hashable)

MAX_QUEUED_TOKENS = 262_144  # of finished texts; beyond that the oldest ones are dropped


SESSIONS, SALTS = 64, 16  # that are kept: the most recently used ones
SESSION_SHARE = 4  # a session keeps a salt's tokens divided by this


def max_tokens(shared_tokens: int) -> int:
    """Maximum tokens of all stores of a `TextLibrary`."""
    return SESSIONS * (shared_tokens // SESSION_SHARE) + SALTS * shared_tokens


class TextLibrary:
    """The stores of all sessions and salts. A request reads those of its own session and salt only.

    Finished texts are queued and written by `work`, since writing a long one at once would delay a step.

    shared_tokens: tokens kept per salt for other requests; a session keeps a quarter as many. 0: nothing is kept.
    """

    def __init__(self, library: ctypes.PyDLL, shared_tokens: int) -> None:
        self._native, self._shared_tokens = library, shared_tokens
        self._sessions: OrderedDict[tuple[str, str], TextStore] = OrderedDict()
        self._shared: OrderedDict[str, TextStore] = OrderedDict()
        self._waiting: deque[tuple[TextStore, array[int]]] = deque()
        self._waiting_tokens = 0
        self._writer: TextWriter | None = None

    def stores(self, request: Request) -> list[TextStore]:
        """The stores that ``request`` drafts from: its session's, then its salt's."""
        tokens, salt, found = self._shared_tokens, request.cache_salt, []
        if not tokens:
            return []
        if request.session:
            key = (salt, request.session)
            store = self._sessions.get(key) or TextStore(self._native, tokens // SESSION_SHARE)
            found.append(_use(self._sessions, key, store, SESSIONS))
        store = self._shared.get(salt) or TextStore(self._native, tokens)
        return [*found, _use(self._shared, salt, store, SALTS)]

    def add(self, request: Request, text: array[int]) -> None:
        """Queue the complete text of ``request``."""
        for store in self.stores(request):
            self._waiting.append((store, text))
            self._waiting_tokens += len(text)
        while self._waiting_tokens > MAX_QUEUED_TOKENS:
            self._waiting_tokens -= len(self._waiting.popleft()[1])

    @property
    def is_behind(self) -> bool:
        """Whether a text is not written yet."""
        return self._writer is not None or bool(self._waiting)

    def work(self, budget: int) -> None:
        """Write at most ``budget`` queued tokens."""
        while budget > 0 and self.is_behind:
            if self._writer is None:
                store, text = self._waiting.popleft()
                self._waiting_tokens -= len(text)
                self._writer = TextWriter(self._native, store, text)
            budget -= max(1, self._writer.work(budget))
            if not self._writer.remaining:
                self._writer = None


def _use(stores: OrderedDict[Key, TextStore], key: Key, store: TextStore, limit: int) -> TextStore:
    """Mark ``store`` as most recently used, and drop the least recently used ones beyond ``limit``."""
    stores[key] = store
    stores.move_to_end(key)
    while len(stores) > limit:
        stores.popitem(last=False)
    return store
