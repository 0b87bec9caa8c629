"""The clock of a run: seconds since 1970, but without the jumps of a clock that is set."""

from __future__ import annotations

import time


class RunClock:
    """Records of several runs of a server lie on one axis, and differences of times are monotonic ones."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Unix time, as it was when the clock was made and monotonic from then on."""
        return time.monotonic() + self._offset

    def at(self, monotonic_s: float) -> float:
        """The same of a moment by `time.monotonic`."""
        return monotonic_s + self._offset
