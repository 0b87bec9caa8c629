"""A row of numbers as one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*%#"


def sparkline(values: Sequence[float], top: float, width: int, bars: str = BARS) -> str:
    """``values`` on a scale from 0 to ``top``, at most ``width`` characters; more values are averaged in equal parts.

    What lies outside the scale is shown as its end, what is not finite as a blank.
    """
    n = min(len(values), width)
    cuts = [i * len(values) // n for i in range(n + 1)] if n else []
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    return "".join(_bar(mean, top, bars) for mean in means)


def _bar(value: float, top: float, bars: str) -> str:
    if not math.isfinite(value):
        return " "
    share = value / top if top > 0 else 0.0
    return bars[min(len(bars) - 1, max(0, int(share * len(bars))))]
