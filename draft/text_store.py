"""A bounded store of texts to draft from, in two generations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from draft.suffix_automaton import SuffixAutomaton


class TextStore:
    """At most ``limit`` tokens of text, none older than ``age_s`` seconds.

    Text is appended to the young generation. When that holds half of the limit, or has grown for half of the age, it
    becomes the old one, and the former old one is dropped: an automaton can not forget single texts, and this takes
    constant time. What is used again is written again to the young one (`TextWriter` skips only what that holds), so
    text in use stays.
    """

    def __init__(self, limit: int, age_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._half, self._age_s, self._clock = max(1, limit // 2), age_s, clock
        self._old, self._young = SuffixAutomaton(), SuffixAutomaton()
        self._old_since = self._young_since = clock()

    @property
    def young(self) -> SuffixAutomaton:
        """The generation that grows now."""
        return self._young

    @property
    def generations(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        """The young and the old one, without what is too old."""
        self.expire()
        return self._young, self._old

    def append(self, token: int) -> None:
        """One more token of text, or `BREAK` where the next one does not follow the last."""
        self.make_room()
        self._young.append(token)

    def make_room(self) -> None:
        """Begin a new generation if the young one is full."""
        if self._young.size >= self._half:
            self._turn()

    def expire(self) -> None:
        """Let go of what is too old."""
        now = self._clock()
        if now - self._young_since >= self._age_s / 2:
            if self._young.size:
                self._turn()
            self._young_since = now
        if self._old.size and now - self._old_since >= self._age_s:
            self._old = SuffixAutomaton()

    def _turn(self) -> None:
        self._old, self._old_since = self._young, self._young_since
        self._young, self._young_since = SuffixAutomaton(), self._clock()
