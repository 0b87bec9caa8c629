"""Code completion for all protocols: requests, sessions, and the outcomes of suggestions."""

from __future__ import annotations

import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from server.auth.principal import Principal
from server.completion.coalescing import RequestCoalescer, Submitter
from server.completion.editor_session import EditorSession
from server.completion.requests import RequestMaker


class Outcome(StrEnum):
    """What the user did with a suggestion."""

    SHOWN = "shown"
    ACCEPTED = "accepted"
    PARTIALLY_ACCEPTED = "partially_accepted"
    REJECTED = "rejected"


@dataclass(slots=True)
class Acceptance:
    """Counts of suggestions and of their characters."""

    suggested: int = 0
    shown: int = 0
    accepted: int = 0
    partially_accepted: int = 0
    rejected: int = 0
    shown_characters: int = 0
    accepted_characters: int = 0
    shown_ms: float = 0.0  # total time that suggestions were visible

    def count(self, outcome: Outcome, characters: int, accepted: int, shown_ms: float, sign: int = 1) -> None:
        """Count a suggestion of ``characters`` with ``outcome``; ``sign`` -1 revokes it."""
        self.shown += sign
        self.shown_characters += sign * characters
        self.accepted_characters += sign * accepted
        self.shown_ms += sign * shown_ms
        self.accepted += sign * (outcome is Outcome.ACCEPTED)
        self.partially_accepted += sign * (outcome is Outcome.PARTIALLY_ACCEPTED)
        self.rejected += sign * (outcome is Outcome.REJECTED)


OUTCOME_SUGGESTIONS, OUTCOME_SESSIONS = 4096, 1024

# Tenant and cache salt
Owner = tuple[str, str]


@dataclass(slots=True)
class _Suggestion:
    session: str
    characters: int
    outcome: Outcome | None = None
    accepted: int = 0
    shown_ms: float = 0.0


class OutcomeLog:
    """Outcomes of the last `OUTCOME_SUGGESTIONS` suggestions and counts of the last `OUTCOME_SESSIONS` sessions;
    ``total`` covers all."""

    def __init__(self) -> None:
        self.total = Acceptance()
        self.reached = Counter[str](dict.fromkeys(Outcome, 0))  # reports that changed an outcome: only grows
        self._suggestions: OrderedDict[tuple[Owner, str], _Suggestion] = OrderedDict()
        self._sessions: OrderedDict[tuple[Owner, str], Acceptance] = OrderedDict()

    @property
    def n_suggested(self) -> int:
        """Suggestions so far."""
        return self.total.suggested

    def suggested(self, owner: Owner, suggestion: str, session: str, characters: int) -> None:
        """Record a complete suggestion; an empty one is ignored."""
        if not characters:
            return
        for figures in self._figures(owner, session):
            figures.suggested += 1
        self._suggestions[owner, suggestion] = _Suggestion(session, characters)
        self._suggestions.move_to_end((owner, suggestion))
        while len(self._suggestions) > OUTCOME_SUGGESTIONS:
            self._suggestions.popitem(last=False)

    def report(self, owner: Owner, suggestion: str, outcome: Outcome, accepted: int, shown_ms: float) -> bool:
        """Record an outcome; a later report replaces it. Returns False for an unknown suggestion.

        accepted: characters accepted, used for `Outcome.PARTIALLY_ACCEPTED`. shown_ms: time it was visible.
        """
        known = self._suggestions.get((owner, suggestion))
        if known is None:
            return False
        if outcome is Outcome.ACCEPTED:
            accepted = known.characters
        elif outcome is not Outcome.PARTIALLY_ACCEPTED:
            accepted = 0
        accepted = min(accepted, known.characters)
        shown_ms = max(shown_ms, known.shown_ms)
        self.reached[outcome] += known.outcome is not outcome
        for figures in self._figures(owner, known.session):
            if known.outcome is not None:
                figures.count(known.outcome, known.characters, known.accepted, known.shown_ms, sign=-1)
            figures.count(outcome, known.characters, accepted, shown_ms)
        known.outcome, known.accepted, known.shown_ms = outcome, accepted, shown_ms
        return True

    def of_session(self, owner: Owner, session: str) -> Acceptance | None:
        """A session's counts, if they are still kept."""
        return self._sessions.get((owner, session))

    def session_of(self, owner: Owner, suggestion: str) -> str:
        """The session of a suggestion; empty if it has none or is unknown."""
        known = self._suggestions.get((owner, suggestion))
        return "" if known is None else known.session

    def _figures(self, owner: Owner, session: str) -> list[Acceptance]:
        if not session:
            return [self.total]
        figures = self._sessions.setdefault((owner, session), Acceptance())
        self._sessions.move_to_end((owner, session))
        while len(self._sessions) > OUTCOME_SESSIONS:
            self._sessions.popitem(last=False)
        return [self.total, figures]


SESSIONS, IDLE_S, SESSION_CHARACTERS = 256, 1800.0, 1 << 25  # most sessions, idle seconds, characters of documents


class SessionTable:
    """Editor sessions, bounded by number, by the size of their documents, and by idle time; the least recently used are
    evicted. An evicted session still serves the stream that holds it."""

    def __init__(
        self,
        make: Callable[[str], EditorSession],
        *,
        sessions: int = SESSIONS,
        idle_s: float = IDLE_S,
        characters: int = SESSION_CHARACTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._clock = make, clock
        self._limits = sessions, idle_s, characters
        self._sessions: OrderedDict[tuple[Owner, str], EditorSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, owner: Owner, session_id: str) -> EditorSession:
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

    def used(self, owner: Owner, session: EditorSession) -> None:
        """Mark ``session`` as used, and evict sessions beyond the limits."""
        most, idle_s, characters = self._limits
        key, now = (owner, session.session_id), self._clock()
        session.used_s = now
        if self._sessions.get(key) is session:
            self._sessions.move_to_end(key)
        total = sum(kept.characters for kept in self._sessions.values())
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= most and total <= characters and now - oldest.used_s <= idle_s:
                break
            if oldest is session:
                break
            total -= oldest.characters
            self._sessions.popitem(last=False)


class CompletionService:
    """Code completion: how requests are made, coalesced requests, sessions, outcomes. Belongs to one event loop."""

    def __init__(self, maker: RequestMaker, submitter: Submitter, outcomes: OutcomeLog | None = None) -> None:
        """submitter: the way to the engine. outcomes: may be shared with other models."""
        self.maker = maker
        self.runs = RequestCoalescer(submitter, maker.time)
        self.outcomes = outcomes or OutcomeLog()
        self.sessions = SessionTable(self._new_session)

    @staticmethod
    def owner(principal: Principal, cache_salt: str) -> Owner:
        """Who may see a session, a suggestion, a coalesced request."""
        return (principal.tenant, cache_salt)

    def _new_session(self, session_id: str) -> EditorSession:
        return EditorSession(session_id, self.maker, self.runs)
