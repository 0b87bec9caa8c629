"""What users did with suggestions."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

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
