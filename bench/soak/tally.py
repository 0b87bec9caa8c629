"""What became of visits, in numbers."""

from __future__ import annotations

from collections import Counter

_MESSAGES = 50


class Tally:
    """``outcomes``: by visit and outcome. ``faults``: messages, the first `_MESSAGES` kinds of them; ``n_faults``: all
    of them."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self.n_faults = 0

    @property
    def visits(self) -> int:
        """Number of them."""
        return self.outcomes.total()

    def add(self, visit: str, outcome: str) -> None:
        """One visit ended."""
        self.outcomes[visit, outcome] += 1

    def fault(self, visit: str, message: str) -> None:
        """One visit met a fault."""
        self.add(visit, "fault")
        self.n_faults += 1
        line = f"{visit}: {message}"
        if line in self.faults or len(self.faults) < _MESSAGES:
            self.faults[line] += 1

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Outcomes by visit."""
        found: dict[str, dict[str, int]] = {}
        for (visit, outcome), count in sorted(self.outcomes.items()):
            found.setdefault(visit, {})[outcome] = count
        return found
