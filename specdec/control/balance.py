"""Whether costly drafting has paid so far, by the clock."""

from __future__ import annotations

import math

LIMIT = 6.0  # plain steps of loss that one sequence may run up; of n, whose luck evens out, the root of n times less
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # steps; doubled by every loss that follows without a win between


class Balance:
    """What steps with a costly drafter won or lost on plain decoding, added up (a CUSUM; Page 1954).

    The gate adds up estimates, each somewhat wrong; where drafting about breaks even, the sum may be wrong too. This
    compares what the tokens took with what they would have taken, for batches of about ``sequences``. It lets the
    drafters rest once the loss exceeds the limit, and remembers no larger win than that.
    """

    def __init__(self, sequences: int) -> None:
        self._limit = LIMIT / math.sqrt(sequences)
        self._won = 0.0
        self._pause, self._next = 0, FIRST_PAUSE

    @property
    def rests(self) -> bool:
        """Whether costly drafters are left out."""
        return self._pause > 0

    def observe(self, gain: float | None) -> None:
        """A step gained so many plain steps' time; None: no costly drafter was on, or the step says nothing."""
        if self._pause:
            self._pause -= 1
        elif gain is not None:
            self._won = min(self._won + gain, self._limit)
            if self._won < -self._limit:
                self._won, self._pause = 0.0, self._next
                self._next = min(2 * self._next, LONGEST_PAUSE)
            elif self._won >= self._limit:
                self._next = FIRST_PAUSE
