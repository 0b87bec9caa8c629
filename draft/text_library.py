"""The texts kept beyond a request: one store per session, one per salt."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import TypeVar

from draft.text_store import TextStore
from draft.text_writer import TextWriter
from specdec.config import SpeculationConfig
from specdec.types import Request

Key = TypeVar("Key", bound=Hashable)

BACKLOG = 262_144  # tokens that may wait to be written; beyond that the oldest texts are let go


class TextLibrary:
    """Requests see the texts of their own session and of their own salt only.

    Stores are kept for the ``sessions`` and ``shared_salts`` used last. Finished texts wait in line and are written
    by `work`, because writing a long one at once would hold up a step.
    """

    def __init__(self, config: SpeculationConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._sessions: OrderedDict[tuple[str, str], TextStore] = OrderedDict()
        self._shared: OrderedDict[str, TextStore] = OrderedDict()
        self._waiting: deque[tuple[TextStore, list[int]]] = deque()
        self._backlog = 0  # tokens in _waiting
        self._writer: TextWriter | None = None

    def stores(self, request: Request) -> list[TextStore]:
        """What ``request`` may draft from, the nearest first."""
        config, found = self._config, []
        if request.session and config.session_tokens and config.sessions:
            key = (request.cache_salt, request.session)
            store = self._sessions.get(key) or TextStore(config.session_tokens, clock=self._clock)
            found.append(_use(self._sessions, key, store, config.sessions))
        if config.shared_tokens:
            salt = request.cache_salt
            store = self._shared.get(salt) or TextStore(config.shared_tokens, config.shared_age_s, self._clock)
            found.append(_use(self._shared, salt, store, config.shared_salts))
        return found

    def add(self, request: Request, tokens: Seq[int]) -> None:
        """A text of ``request`` is complete; it is kept in line until `work` gets to it."""
        text = list(tokens)
        for store in self.stores(request):
            self._waiting.append((store, text))
            self._backlog += len(text)
        while self._backlog > BACKLOG:
            self._backlog -= len(self._waiting.popleft()[1])

    def work(self, budget: int) -> None:
        """Write what waits, at most ``budget`` tokens of it."""
        while budget > 0 and (self._writer or self._waiting):
            if self._writer is None:
                store, text = self._waiting.popleft()
                self._backlog -= len(text)
                self._writer = TextWriter(store, text)
            budget -= max(1, self._writer.work(budget))
            if not self._writer.remaining:
                self._writer = None


def _use(stores: OrderedDict[Key, TextStore], key: Key, store: TextStore, limit: int) -> TextStore:
    """Make ``store`` the one used last, and let go of those beyond ``limit``."""
    stores[key] = store
    stores.move_to_end(key)
    while len(stores) > limit:
        stores.popitem(last=False)
    return store
