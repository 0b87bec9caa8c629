"""Bounded stores of earlier texts: one per session and one per salt, written a few tokens at a time."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import TypeVar

from draft.suffix_automaton import BREAK, SuffixAutomaton, SuffixCursor
from specdec.core.types import Request


class TextStore:
    """At most ``limit`` tokens of text.

    Text is appended to the young generation. When that holds half of the limit, it becomes the old generation, and the
    previous old one is dropped: an automaton cannot drop single texts, and this takes constant time. Text that is used
    again is written to the young generation again (`TextWriter` skips only what that holds), so text in use stays.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self.young = SuffixAutomaton()  # to which text is appended
        self._old = SuffixAutomaton()

    @property
    def generations(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        """The young and the old generation."""
        return self.young, self._old

    def append(self, token: int) -> None:
        """Append a token of text, or `BREAK` if the next token does not follow the last one."""
        self.make_room()
        self.young.append(token)

    def make_room(self) -> None:
        """Start a new generation if the young one is full."""
        if self.young.size >= self._half:
            self._old, self.young = self.young, SuffixAutomaton()


KNOWN_TOKENS = 32  # least length of a match whose tokens are not written again
OVERLAP_TOKENS = 16  # known tokens written on either side of new ones, so that contexts span the boundary


class TextWriter:
    """Writes a text to a store, except the parts that the store's young generation holds.

    An editor sends the same file again and again, with small changes. A cursor matches the text ahead of the writing.
    A token is known if it lies in a match of at least `KNOWN_TOKENS`, which is decided once the current match, whose
    start never moves back, begins after it. Between two adjacent matches lies a seam, which is new although both sides
    are known.
    """

    def __init__(self, store: TextStore, tokens: Seq[int]) -> None:
        self._store, self._tokens = store, tokens
        self._cursor = SuffixCursor(store.young)
        self._into = store.young  # generation of the last write
        self._read = 0  # tokens that the cursor has matched
        self._decided = 0  # tokens that are written or skipped: up to the start of the current match
        self._written = -1  # end of the last written run; -1: none
        self._known = 0  # end of the last match of at least KNOWN_TOKENS
        self._trailing = 0  # known tokens left to write after a new one

    @property
    def remaining(self) -> int:
        """Number of tokens that are not processed."""
        return len(self._tokens) - self._read

    def work(self, budget: int) -> int:
        """Process at most ``budget`` tokens; returns their number."""
        done = min(self.remaining, budget)
        for _ in range(done):
            young = self._store.young
            if young is not self._cursor.automaton:
                self._cursor = SuffixCursor(young)  # a new generation, which is empty
            self._cursor.step(self._tokens[self._read])
            length = self._cursor.length
            self._read += 1
            if length >= KNOWN_TOKENS:
                self._known = self._read
            # No match holds the runs across the start of a match of at most OVERLAP_TOKENS.
            self._decide(self._read - length, seam=length <= OVERLAP_TOKENS)
        if not self.remaining:
            self._decide(len(self._tokens), seam=False)
        return done

    def _decide(self, upto: int, seam: bool) -> None:
        while self._decided < upto:
            index = self._decided
            if index >= self._known or (seam and index == upto - 1):
                self._write(index)
                self._trailing = OVERLAP_TOKENS
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
            for i in range(max(0, index - OVERLAP_TOKENS), index):
                store.append(self._tokens[i])
        store.append(self._tokens[index])
        self._written = index + 1


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

    def __init__(self, shared_tokens: int) -> None:
        self._shared_tokens = shared_tokens
        self._sessions: OrderedDict[tuple[str, str], TextStore] = OrderedDict()
        self._shared: OrderedDict[str, TextStore] = OrderedDict()
        self._waiting: deque[tuple[TextStore, list[int]]] = deque()
        self._waiting_tokens = 0
        self._writer: TextWriter | None = None

    def stores(self, request: Request) -> list[TextStore]:
        """The stores that ``request`` drafts from: its session's, then its salt's."""
        tokens, salt, found = self._shared_tokens, request.cache_salt, []
        if not tokens:
            return []
        if request.session:
            key = (salt, request.session)
            store = self._sessions.get(key) or TextStore(tokens // SESSION_SHARE)
            found.append(_use(self._sessions, key, store, SESSIONS))
        store = self._shared.get(salt) or TextStore(tokens)
        return [*found, _use(self._shared, salt, store, SALTS)]

    def add(self, request: Request, tokens: Seq[int]) -> None:
        """Queue the complete text of ``request``."""
        text = list(tokens)
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
