"""Bounded stores of texts to draft from: one per session, one per salt, written a few tokens at a time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from draft.suffix_automaton import BREAK, SuffixAutomaton, SuffixCursor
from specdec.core.types import Request


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


KNOWN = 32  # tokens: a run this long that the store holds is not written again
OVERLAP = 16  # known tokens written on either side of new ones, so that contexts reach across the seam


class TextWriter:
    """An editor sends the same file again and again; only what changed in it is new to the store.

    A cursor runs through the text ahead of the writing. A token is known once it lies in a match of at least
    ``KNOWN`` tokens, and can be decided on once it has left the current match, whose start never moves back. Where
    one match ends and the next begins lies a seam, which is new even if both sides are known.
    """

    def __init__(self, store: TextStore, tokens: Seq[int]) -> None:
        self._store, self._tokens = store, tokens
        self._cursor = SuffixCursor(store.young)
        self._into = store.young  # what was written to last
        self._read = 0  # tokens the cursor has seen
        self._decided = 0  # tokens before here are written or skipped: the start of the current match
        self._written = -1  # tokens before here and back to the last BREAK are written; -1: none yet
        self._known = 0  # where the last long match ended
        self._trailing = 0  # known tokens still to be written after a new one

    @property
    def remaining(self) -> int:
        """Tokens not yet read."""
        return len(self._tokens) - self._read

    def work(self, budget: int) -> int:
        """Go on for at most ``budget`` tokens; returns how many that was."""
        self._store.expire()
        done = min(self.remaining, budget)
        for _ in range(done):
            young = self._store.young
            if young is not self._cursor.automaton:
                self._cursor = SuffixCursor(young)  # a generation ended; the new one knows nothing
            self._cursor.step(self._tokens[self._read])
            length = self._cursor.length
            self._read += 1
            if length >= KNOWN:
                self._known = self._read
            # A match that reaches back less than OVERLAP leaves runs across its start that no match holds.
            self._decide(self._read - length, seam=length <= OVERLAP)
        if not self.remaining:
            self._decide(len(self._tokens), seam=False)
        return done

    def _decide(self, upto: int, seam: bool) -> None:
        while self._decided < upto:
            index = self._decided
            if index >= self._known or (seam and index == upto - 1):
                self._write(index)
                self._trailing = OVERLAP
            elif self._trailing:
                self._write(index)
                self._trailing -= 1
            self._decided += 1

    def _write(self, index: int) -> None:
        store = self._store
        store.make_room()
        if self._written != index or store.young is not self._into:
            self._into = store.young
            if self._into.size:
                store.append(BREAK)
            for i in range(max(0, index - OVERLAP), index):
                store.append(self._tokens[i])
        store.append(self._tokens[index])
        self._written = index + 1


Key = TypeVar("Key", bound=Hashable)

MAX_WAITING = 262_144  # tokens that wait to be written; beyond that the oldest texts are dropped


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Sizes of the stores."""

    session_tokens: int = 65_536
    """Tokens kept per session; 0: none."""
    shared_tokens: int = 262_144
    """Tokens kept per salt for other requests; 0: none."""
    sessions: int = 64
    """Sessions kept, the most recently used ones."""
    salts: int = 16
    """Salts kept, the most recently used ones."""
    shared_age_s: float = 3600.0
    """Seconds after which shared text is dropped."""

    @property
    def tokens(self) -> int:
        """Tokens that all stores hold at most."""
        return self.sessions * self.session_tokens + self.salts * self.shared_tokens


class TextLibrary:
    """The stores of all sessions and salts. A request reads those of its own session and salt only.

    Finished texts are queued and written by `work`, since writing a long one at once would delay a step.
    """

    def __init__(self, limits: TextLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._sessions: OrderedDict[tuple[str, str], TextStore] = OrderedDict()
        self._shared: OrderedDict[str, TextStore] = OrderedDict()
        self._waiting: deque[tuple[TextStore, list[int]]] = deque()
        self._waiting_tokens = 0
        self._writer: TextWriter | None = None

    def stores(self, request: Request) -> list[TextStore]:
        """The stores that ``request`` drafts from: its session's, then its salt's."""
        limits, found = self._limits, []
        if request.session and limits.session_tokens:
            key = (request.cache_salt, request.session)
            store = self._sessions.get(key) or TextStore(limits.session_tokens, clock=self._clock)
            found.append(_use(self._sessions, key, store, limits.sessions))
        if limits.shared_tokens:
            salt = request.cache_salt
            store = self._shared.get(salt) or TextStore(limits.shared_tokens, limits.shared_age_s, self._clock)
            found.append(_use(self._shared, salt, store, limits.salts))
        return found

    def add(self, request: Request, tokens: Seq[int]) -> None:
        """Queue the complete text of ``request``."""
        text = list(tokens)
        for store in self.stores(request):
            self._waiting.append((store, text))
            self._waiting_tokens += len(text)
        while self._waiting_tokens > MAX_WAITING:
            self._waiting_tokens -= len(self._waiting.popleft()[1])

    def work(self, budget: int) -> None:
        """Write at most ``budget`` queued tokens."""
        while budget > 0 and (self._writer or self._waiting):
            if self._writer is None:
                store, text = self._waiting.popleft()
                self._waiting_tokens -= len(text)
                self._writer = TextWriter(store, text)
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
