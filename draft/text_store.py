"""Bounded stores of earlier texts: one per session and one per salt."""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

from draft.lookups import Native
from specdec.core.types import Request

BREAK = -1  # token between two texts: no sequence holds it, so no match crosses it


class TextStore(Native):
    """At most ``limit`` tokens of text. Written half by half: a full half is kept until the next one is full."""

    def __init__(self, library: ctypes.PyDLL, limit: int) -> None:
        super().__init__(library, "store", limit)
        self._write = library.sd_store_write

    def write(self, text: array[int]) -> None:
        """Append ``text``, except the parts that the half being written holds."""
        self._write(self, *text.buffer_info())


Key = TypeVar("Key", bound=Hashable)

SESSIONS, SALTS = 64, 16  # that are kept: the most recently used ones
SESSION_SHARE = 4  # a session keeps a salt's tokens divided by this


def max_tokens(shared_tokens: int) -> int:
    """Maximum tokens of all stores of a `TextLibrary`."""
    return SESSIONS * (shared_tokens // SESSION_SHARE) + SALTS * shared_tokens


class TextLibrary:
    """The stores of all sessions and salts. A request reads those of its own session and salt only.

    shared_tokens: tokens kept per salt for other requests; a session keeps a quarter as many. 0: nothing is kept.
    """

    def __init__(self, library: ctypes.PyDLL, shared_tokens: int) -> None:
        self._native, self._shared_tokens = library, shared_tokens
        self._sessions: OrderedDict[tuple[str, str], TextStore] = OrderedDict()
        self._shared: OrderedDict[str, TextStore] = OrderedDict()

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
        """Write the complete text of ``request``, at some 0.2 us a token."""
        for store in self.stores(request):
            store.write(text)


def _use(stores: OrderedDict[Key, TextStore], key: Key, store: TextStore, limit: int) -> TextStore:
    """Mark ``store`` as most recently used, and drop the least recently used ones beyond ``limit``."""
    stores[key] = store
    stores.move_to_end(key)
    while len(stores) > limit:
        stores.popitem(last=False)
    return store
