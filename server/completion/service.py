"""Code completion as every protocol offers it: requests, runs, sessions, and what became of suggestions."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from server.auth.principal import Principal
from server.completion.coalescing import RequestCoalescer, Submit
from server.completion.editor_session import EditorSession
from server.completion.requests import RequestMaker


class Outcome(StrEnum):
    """What became of a suggestion."""

    SHOWN = "shown"
    ACCEPTED = "accepted"
    PARTIALLY_ACCEPTED = "partially_accepted"
    REJECTED = "rejected"


@dataclass(slots=True)
class Acceptance:
    """Counts of suggestions, and of their characters: of those that were shown, and of what was taken over of them."""

    suggested: int = 0
    shown: int = 0
    accepted: int = 0
    partially_accepted: int = 0
    rejected: int = 0
    shown_characters: int = 0
    accepted_characters: int = 0
    shown_ms: float = 0.0

    def count(self, outcome: Outcome, characters: int, accepted: int, shown_ms: float, sign: int = 1) -> None:
        """One suggestion more of ``characters`` that came to ``outcome``; with ``sign`` -1 it is taken back."""
        self.shown += sign
        self.shown_characters += sign * characters
        self.accepted_characters += sign * accepted
        self.shown_ms += sign * shown_ms
        self.accepted += sign * (outcome is Outcome.ACCEPTED)
        self.partially_accepted += sign * (outcome is Outcome.PARTIALLY_ACCEPTED)
        self.rejected += sign * (outcome is Outcome.REJECTED)


OUTCOME_SUGGESTIONS, OUTCOME_SESSIONS = 4096, 1024

# Who may see something: tenant and cache salt
Owner = tuple[str, str]


@dataclass(slots=True)
class _Suggestion:
    session: str
    characters: int
    outcome: Outcome | None = None
    accepted: int = 0
    shown_ms: float = 0.0


class OutcomeLog:
    """Bounded: the `SUGGESTIONS` made last, and the figures of the `SESSIONS` used last. ``total`` covers all."""

    def __init__(self) -> None:
        self.total = Acceptance()
        self._suggestions: OrderedDict[tuple[Owner, str], _Suggestion] = OrderedDict()
        self._sessions: OrderedDict[tuple[Owner, str], Acceptance] = OrderedDict()

    def suggested(self, owner: Owner, suggestion: str, session: str, characters: int) -> None:
        """A suggestion was made whole; one without text is none."""
        if not characters:
            return
        for figures in self._figures(owner, session):
            figures.suggested += 1
        self._suggestions[owner, suggestion] = _Suggestion(session, characters)
        self._suggestions.move_to_end((owner, suggestion))
        while len(self._suggestions) > OUTCOME_SUGGESTIONS:
            self._suggestions.popitem(last=False)

    def report(self, owner: Owner, suggestion: str, outcome: Outcome, accepted: int, shown_ms: float) -> bool:
        """What became of it. The last report counts; ``accepted`` characters matter where it was taken over in part.
        False: it is not remembered, or never was."""
        known = self._suggestions.get((owner, suggestion))
        if known is None:
            return False
        if outcome is Outcome.ACCEPTED:
            accepted = known.characters
        elif outcome is not Outcome.PARTIALLY_ACCEPTED:
            accepted = 0
        accepted = min(accepted, known.characters)
        shown_ms = max(shown_ms, known.shown_ms)
        for figures in self._figures(owner, known.session):
            if known.outcome is not None:
                figures.count(known.outcome, known.characters, known.accepted, known.shown_ms, sign=-1)
            figures.count(outcome, known.characters, accepted, shown_ms)
        known.outcome, known.accepted, known.shown_ms = outcome, accepted, shown_ms
        return True

    def of_session(self, owner: Owner, session: str) -> Acceptance | None:
        """A session's figures, while they are kept."""
        return self._sessions.get((owner, session))

    def session_of(self, owner: Owner, suggestion: str) -> str:
        """The session a suggestion was made in; empty where there was none, or it is not remembered."""
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


SESSIONS, IDLE_S, SESSION_CHARACTERS = 256, 1800.0, 1 << 25


class SessionTable:
    """Bounded by number, by the size of the documents kept, and by age since the last use; who was used longest ago
    goes first. A session that was let go still serves the stream that holds it. ``clock`` gives monotonic seconds."""

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
        """A session for a stream that begins. One of the same id and owner hands over its documents and ends what it
        runs: its editor has connected anew."""
        session = self._make(session_id or uuid.uuid4().hex)
        former = self._sessions.pop((owner, session.session_id), None)
        if former is not None:
            former.stop()
            session.documents, former.documents = former.documents, OrderedDict()
        self._sessions[owner, session.session_id] = session
        self.used(owner, session)
        return session

    def used(self, owner: Owner, session: EditorSession) -> None:
        """``session`` was used; those beyond the limits are let go."""
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

    def __init__(self, maker: RequestMaker, submit: Submit, outcomes: OutcomeLog | None = None) -> None:
        """submit: gives a request to the engine. outcomes: may be shared with other models."""
        self.maker = maker
        self.runs = RequestCoalescer(submit)
        self.outcomes = outcomes or OutcomeLog()
        self.sessions = SessionTable(self._new_session)

    @staticmethod
    def owner(principal: Principal, cache_salt: str) -> Owner:
        """Who may see a session, a suggestion, a coalesced request."""
        return (principal.tenant, cache_salt)

    def _new_session(self, session_id: str) -> EditorSession:
        return EditorSession(session_id, self.maker, self.runs)
