"""What the controller remembers of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

SKILL_PRIOR = 5.0  # observations that weigh as much as the calibration's own word
SKILL_FADE = 0.98
LEAST_SKILL, MOST_SKILL = 0.25, 1.7


@dataclass(slots=True)
class Skill:
    """How much better or worse a drafter does on this text than on texts in general."""

    hits: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """Observed over expected hits, shrunk to 1."""
        found = (self.hits + SKILL_PRIOR) / (self.expected + SKILL_PRIOR)
        return max(LEAST_SKILL, min(MOST_SKILL, found))

    def add(self, expected: float, hit: bool) -> None:
        """A node whose parent was reached."""
        self.hits = SKILL_FADE * self.hits + hit
        self.expected = SKILL_FADE * self.expected + expected


@dataclass(slots=True)
class Usage:
    """What a costly drafter brings here: tokens accepted of its own tree, and levels it ran, per turn (averages).

    ``idle``: steps since it was asked; ``misses``: probes in a row that did not pay; ``price``: tokens a level must
    bring to pay, when last decided.
    """

    gain: float
    levels: float
    on: bool = True
    idle: int = 0
    misses: int = 0
    price: float = 0.0


@dataclass(slots=True)
class SequenceControl:
    """State of one sequence; ``key`` numbers sequences in order of entry, ``bucket`` is its temperature's. ``emitted``:
    tokens that came out so far."""

    key: int
    bucket: int
    emitted: int = 0
    skills: dict[str, Skill] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
