"""How suggestions were received."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
