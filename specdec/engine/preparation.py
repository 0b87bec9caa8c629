"""Requests that wait for other threads: for their grammar, the tables of token healing, or their pages from disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from specdec.core.sampling import TokenGrammar
from specdec.core.types import FinishReason, Request
from specdec.engine.disk_cache import DiskLoad
from specdec.errors import QueueFullError
from specdec.grammar.compiler import RETRY_S, GrammarCompiler

ADMISSION_S = 0.005
"""Seconds that a step may spend on admitting prepared requests after the first; running streams wait for it."""
IDLE_WAIT_S = 0.005
"""Time that a step waits for a preparation if no request runs."""


@dataclass(slots=True)
class WaitingRequest:
    """A request before it is admitted."""

    request: Request
    arrival_s: float
    """By the engine's clock."""
    prepared: Future[Any] | None
    """Of its grammar or token healing."""
    pages: DiskLoad | None = None
    """The load of its pages on disk, or of the first of them."""

    @property
    def is_ready(self) -> bool:
        """Whether it waits for nothing any more."""
        return (self.prepared is None or self.prepared.done()) and (self.pages is None or self.pages.ended)

    def expired(self, now: float) -> FinishReason | None:
        """Its ending if its deadline or time limit has passed at ``now``."""
        deadline_s, limit_s = self.request.deadline_s, self.request.stopping.time_limit_s
        if deadline_s is not None and now >= self.arrival_s + deadline_s:
            return FinishReason.DEADLINE
        return FinishReason.TIME_LIMIT if limit_s is not None and now >= self.arrival_s + limit_s else None


class RequestPreparation:
    """Starts what a request needs before its first step. max_waiting: requests that may wait for it."""

    def __init__(self, grammars: GrammarCompiler, max_waiting: int) -> None:
        self._grammars, self._max_waiting = grammars, max(1, max_waiting)
        self.waiting: dict[str, WaitingRequest] = {}

    @property
    def is_full(self) -> bool:
        """Whether `hold` would refuse a request."""
        return len(self.waiting) >= self._max_waiting

    def start(self, request: Request) -> Future[Any] | None:
        """Start to prepare ``request``; None: it needs nothing.

        Raises:
            InvalidRequestError: the model cannot be constrained by grammars.
            QueueFullError: too many grammars of its key wait.
        """
        if request.grammar is not None:
            return self._grammars.start(request.grammar, request.cache_salt)
        return self._grammars.prepare() if request.healing_prefix else None

    def hold(self, waiting: WaitingRequest) -> None:
        """Keep ``waiting`` until it is ready.

        Raises:
            QueueFullError: too many requests wait.
        """
        if self.is_full:
            self._give_up(waiting)
            raise QueueFullError(self._max_waiting, RETRY_S)
        self.waiting[waiting.request.request_id] = waiting

    def drop(self, request_id: str) -> WaitingRequest | None:
        """Remove a waiting request, and its grammar if no other request waits for it; None: no such request waits."""
        dropped = self.waiting.pop(request_id, None)
        if dropped is not None:
            self._give_up(dropped)
        return dropped

    def _give_up(self, dropped: WaitingRequest) -> None:
        """Cancel the grammar of ``dropped``, which does not wait, unless another request waits for it."""
        shared = any(other.prepared is dropped.prepared for other in self.waiting.values())
        if dropped.prepared is not None and dropped.request.grammar is not None and not shared:
            dropped.prepared.cancel()

    def grammar(self, waiting: WaitingRequest) -> TokenGrammar | None:
        """The grammar of one sample of ``waiting``, which is prepared. Raises InvalidRequestError if it is refused."""
        request, prepared = waiting.request, waiting.prepared
        if prepared is None:
            return None
        if (error := prepared.exception()) is not None:  # raised for every request of the grammar
            raise error.with_traceback(None)  # an error's traceback keeps what its former raises passed through
        if request.grammar is not None:
            return self._grammars.state(prepared, request.sampling.allowed_token_ids)
        return self._grammars.healing(request.healing_prefix)

    def take_prepared(self) -> Iterator[WaitingRequest]:
        """Remove requests that are prepared, until `ADMISSION_S` have passed."""
        if not self.waiting:
            return
        began = time.perf_counter()
        for request_id in [name for name, waiting in self.waiting.items() if waiting.is_ready]:
            yield self.waiting.pop(request_id)
            if time.perf_counter() - began > ADMISSION_S:
                return

    def wait(self) -> None:
        """Wait up to `IDLE_WAIT_S` until a request is prepared."""
        prepared = [each.prepared for each in self.waiting.values() if each.prepared is not None]
        filled = [each.pages.filled for each in self.waiting.values() if each.pages is not None]
        wait([future for future in (*prepared, *filled) if not future.done()], IDLE_WAIT_S, FIRST_COMPLETED)
