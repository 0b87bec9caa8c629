"""What is remembered of code completion, for all protocols: sessions, and the outcomes of suggestions."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

from server.completion.editor_session import EditorSession
from server.observe.metrics import ServerMetrics


class Outcome(StrEnum):
    """What the user did with a suggestion."""

    SHOWN = "shown"
    ACCEPTED = "accepted"
    PARTIALLY_ACCEPTED = "partially_accepted"
    REJECTED = "rejected"


OUTCOME_SUGGESTIONS = 4096


class OutcomeLog:
    """Counts suggestions and their outcomes in ``metrics``. It remembers the last `OUTCOME_SUGGESTIONS` suggestions.

    owner: who may report the outcome, the caller's scope of the prefix cache.
    """

    def __init__(self, metrics: ServerMetrics | None = None) -> None:
        self.metrics = metrics or ServerMetrics()
        self.metrics.suggestion_outcomes.update(dict.fromkeys(Outcome, 0))
        self._outcomes: OrderedDict[tuple[str, str], Outcome | None] = OrderedDict()

    def suggested(self, owner: str, suggestion: str) -> None:
        """Record a complete suggestion with a text or an edit."""
        self.metrics.suggestions += 1
        self._outcomes[owner, suggestion] = None
        self._outcomes.move_to_end((owner, suggestion))
        while len(self._outcomes) > OUTCOME_SUGGESTIONS:
            self._outcomes.popitem(last=False)

    def report(self, owner: str, suggestion: str, outcome: Outcome) -> bool:
        """Record an outcome; a later report replaces it. Returns False for an unknown suggestion."""
        key = (owner, suggestion)
        if key not in self._outcomes:
            return False
        self.metrics.suggestion_outcomes[outcome] += self._outcomes[key] is not outcome
        self._outcomes[key] = outcome
        return True


SESSIONS, SESSION_CHARACTERS = 256, 1 << 25  # most sessions, and characters of their documents


class SessionTable:
    """Editor sessions, bounded by number and by the size of their documents; the least recently used are evicted. An
    evicted session still serves the stream that holds it. owner: as in `OutcomeLog`."""

    def __init__(self, make: Callable[[str], EditorSession]) -> None:
        """make: a session with an id."""
        self._make = make
        self._sessions: OrderedDict[tuple[str, str], EditorSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, owner: str, session_id: str) -> EditorSession:
        """A session for a new stream. If the editor has reconnected, the former session of the same id and owner is
        stopped and its documents are taken over."""
        session = self._make(session_id or uuid.uuid4().hex)
        former = self._sessions.pop((owner, session.session_id), None)
        if former is not None:
            former.stop()
            session.documents, former.documents = former.documents, OrderedDict()
        self._sessions[owner, session.session_id] = session
        self.used(owner, session)
        return session

    def used(self, owner: str, session: EditorSession) -> None:
        """Mark ``session`` as used, and evict sessions beyond the limits."""
        key = (owner, session.session_id)
        if self._sessions.get(key) is session:
            self._sessions.move_to_end(key)
        total = sum(kept.characters for kept in self._sessions.values())
        while len(self._sessions) > SESSIONS or total > SESSION_CHARACTERS:
            _, oldest = self._sessions.popitem(last=False)
            total -= oldest.characters
