"""Is a difference too small to matter?"""

from __future__ import annotations

from collections.abc import Callable

from server.experiment.stats.interval import Interval


def equivalent(ratio: Callable[[float], Interval], margin: float, alpha: float) -> bool:
    """Whether B / A lies between 1 / (1 + margin) and 1 + margin, at level alpha: two one-sided tests (Schuirmann 1987)
    as one interval of level 1 - 2 alpha. ``ratio`` gives the interval for an alpha; a margin of 0 is never met."""
    return ratio(2 * alpha).inside(1 / (1 + margin), 1 + margin)
