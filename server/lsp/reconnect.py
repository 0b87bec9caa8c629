"""When a lost server is looked for again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reconnect:
    """The pause is ``first_s`` seconds and doubles with each failure up to ``longest_s``. ``lasting_s``: where the
    server is there and refuses, which a setting has to change."""

    first_s: float = 0.25
    longest_s: float = 4.0
    lasting_s: float = 30.0

    def pause_s(self, failures: int, *, lasting: bool) -> float:
        """Seconds until the next try, after so many failures in a row."""
        if lasting:
            return self.lasting_s
        return min(self.longest_s, self.first_s * 2.0 ** min(failures, 30))
