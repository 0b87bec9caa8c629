"""What becomes cached and what is lost, as the prefix cache tells it to those outside of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(slots=True)
class BlocksStored:
    """A run of pages that are cached now, each the next one's predecessor.

    keys: 16 bytes each; parent: the key before the first, None at the beginning of a text; tokens: ids of all the
    pages, 64 for each key; salt: under which they are shared.
    """

    keys: list[bytes]
    parent: bytes | None
    tokens: list[int]
    salt: str


@dataclass(slots=True)
class BlocksRemoved:
    """Pages that are cached no more, by their ``keys``."""

    keys: list[bytes]


@dataclass(slots=True)
class CacheCleared:
    """Nothing is cached any more."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheRecorder:
    """Keeps the events of one cache, in order, until they are taken. Told by the thread that runs the engine.

    Pages under a salt are left out unless ``salted``: those who share no cache with a caller must not learn from the
    events what it asked, nor that it asked.
    """

    def __init__(self, *, salted: bool) -> None:
        self._salted = salted
        self._told: set[bytes] = set()
        self._events: list[CacheEvent] = []

    def stored(self, key: bytes, parent: bytes | None, tokens: Seq[int], salt: str) -> None:
        """A page of ``tokens`` is cached now under ``key``."""
        if salt and not self._salted:
            return
        self._told.add(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and parent is not None and last.keys[-1] == parent:
            last.keys.append(key)
            last.tokens += tokens
        else:
            self._events.append(BlocksStored([key], parent, list(tokens), salt))

    def removed(self, key: bytes) -> None:
        """The page of ``key`` is cached no more."""
        if key not in self._told:
            return
        self._told.remove(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved([key]))

    def flushed(self) -> None:
        """All was dropped that could be: where nothing is left, one event says so for all."""
        if not self._told and self._events and isinstance(self._events[-1], BlocksRemoved):
            self._events[-1] = CacheCleared()

    def take(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
