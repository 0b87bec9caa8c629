"""Remembers suggestions for as long as somebody may tell what became of them, and counts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from server.completion.acceptance import Acceptance, Outcome

SUGGESTIONS, SESSIONS = 4096, 1024

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
        while len(self._suggestions) > SUGGESTIONS:
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
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return [self.total, figures]
