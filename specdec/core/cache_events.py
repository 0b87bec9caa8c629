"""Changes of the prefix cache: the protocol of their followers, and events for routers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol


class CacheFollower(Protocol):
    """Follows which pages hold cached content. Called by the engine's thread; must not raise."""

    def stored(self, page: int, key: bytes, parent: bytes | None, tokens: Seq[int], salt: str) -> None:
        """The content of ``page`` is cached under ``key`` and will not change until it is `removed`."""

    def removed(self, page: int, key: bytes) -> None:
        """``page`` may be written to from now on."""

    def flushed(self) -> None:
        """All pages that no request uses were removed."""


@dataclass(slots=True)
class BlocksStored:
    """Consecutive pages entered the cache."""

    keys: list[bytes]
    """One per page, 16 bytes each."""
    parent: bytes | None
    """The key before the first; None at the beginning of a text."""
    tokens: list[int]
    """Token ids of the pages, 64 per key."""
    salt: str
    """The pages are shared among requests of this salt."""


@dataclass(slots=True)
class BlocksRemoved:
    """The pages of ``keys`` left the cache."""

    keys: list[bytes]


@dataclass(slots=True)
class CacheCleared:
    """All pages left the cache."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheRecorder:
    """Collects the events of one cache, in order, until they are taken. Used by the engine's thread only.

    salted: False: pages under a salt are left out, since a caller's salt keeps its requests private.
    """

    def __init__(self, *, salted: bool) -> None:
        self._salted = salted
        self._recorded: set[bytes] = set()
        self._events: list[CacheEvent] = []

    def stored(self, page: int, key: bytes, parent: bytes | None, tokens: Seq[int], salt: str) -> None:
        """Record that a page of ``tokens`` entered the cache under ``key``."""
        if salt and not self._salted:
            return
        self._recorded.add(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and parent is not None and last.keys[-1] == parent:
            last.keys.append(key)
            last.tokens += tokens
        else:
            self._events.append(BlocksStored([key], parent, list(tokens), salt))

    def removed(self, page: int, key: bytes) -> None:
        """Record that the page of ``key`` left the cache."""
        if key not in self._recorded:
            return
        self._recorded.remove(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved([key]))

    def flushed(self) -> None:
        """Record the end of a flush: if no page is left, one `CacheCleared` replaces the removals."""
        if not self._recorded and self._events and isinstance(self._events[-1], BlocksRemoved):
            self._events[-1] = CacheCleared()

    def take(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
