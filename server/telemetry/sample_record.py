"""What is known of one sample of a request."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types import Finished


@dataclass(slots=True)
class SampleRecord:
    """Times are monotonic seconds of its first and latest tokens; ``finished`` None: it has not, or nobody heard."""

    first_s: float
    last_s: float
    tokens: int = 0
    finished: Finished | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens after the first; None where there was no second."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None
