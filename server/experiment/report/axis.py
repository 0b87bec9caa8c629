"""One axis of a chart: where values lie, and which of them are written."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Axis:
    """Maps values of a range to pixels, on a logarithm where the range spans more than a factor of 30."""

    def __init__(self, values: Sequence[float], begin: float, end: float, logarithmic: bool = False) -> None:
        """``begin`` and ``end`` are the pixels of the least and the greatest value, with a little room around both."""
        low, high = min(values), max(values)
        self.logarithmic = logarithmic and low > 0 and high / low > 30
        if self.logarithmic:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
        self._low, self._high = low - room, high + room
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        """The value's pixel; what lies outside is put at the border."""
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self._low
        part = (value - self._low) / (self._high - self._low)
        return self._begin + min(1.0, max(0.0, part)) * (self._end - self._begin)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values in the range, about so many."""
        if self.logarithmic:
            return self._log_ticks(about)
        rough = (self._high - self._low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _log_ticks(self, about: int) -> list[float]:
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        for parts in ((1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**k for k in powers for m in parts if self._low <= math.log10(m) + k <= self._high]
            if len(found) <= about + 2:
                return found
        return found[:: max(1, len(found) // about)]


def short(value: float) -> str:
    """A number for people: three digits, and `k` for thousands."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k".replace("e+03", "000")
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text else text
