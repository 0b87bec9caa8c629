"""A whole distribution with a band around it."""

from __future__ import annotations

import math


def band_half_width(n: int, alpha: float) -> float:
    """Half the height of the band that holds the whole distribution function of n independent values with chance
    >= 1 - alpha (Dvoretzky, Kiefer & Wolfowitz; constant of Massart, Ann. Probab. 1990)."""
    return min(1.0, math.sqrt(math.log(2 / alpha) / (2 * n))) if n > 0 else 1.0
