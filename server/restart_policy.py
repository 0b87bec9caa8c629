"""When a dead engine is started again, and when no more."""

from __future__ import annotations


class RestartPolicy:
    """Waits longer after each quick death in a row, and gives up after ``give_up_after`` of them.

    A death is quick when the engine had been ready for less than ``quick_s`` seconds, or never. The first wait is
    ``first_s``, each further one twice the last, at most ``longest_s``.
    """

    def __init__(
        self, *, first_s: float = 0.5, longest_s: float = 30.0, quick_s: float = 60.0, give_up_after: int = 5
    ) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._quick_s, self._give_up_after = quick_s, give_up_after
        self._quick_deaths = 0

    @property
    def quick_deaths(self) -> int:
        """Quick deaths in a row until now."""
        return self._quick_deaths

    def after_death(self, ready_for_s: float) -> float | None:
        """Seconds to wait before the next start, after an engine that had been ready for so long; None: give up."""
        self._quick_deaths = self._quick_deaths + 1 if ready_for_s < self._quick_s else 0
        if self._quick_deaths >= self._give_up_after:
            return None
        return float(min(self._longest_s, self._first_s * 2 ** max(0, self._quick_deaths - 1)))
