"""The distributions of scipy that the statistics need, with types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special, stats  # type: ignore[import-untyped]

Floats = npt.NDArray[np.float64]


def normal_cdf(z: float) -> float:
    return float(special.ndtr(z))


def normal_ppf(p: float) -> float:
    return float(special.ndtri(p))


def t_cdf(t: float, df: float) -> float:
    return float(special.stdtr(df, t))


def t_ppf(p: float, df: float) -> float:
    return float(special.stdtrit(df, p))


def binomial_ppf(p: float, n: int, chance: float) -> int:
    """The smallest k with P(Binomial(n, chance) <= k) >= p."""
    return int(stats.binom.ppf(p, n, chance))


def beta_ppf(p: float, a: float, b: float) -> float:
    return float(special.betaincinv(a, b, p))


def chi2_sf(x: float, df: int) -> float:
    return float(special.chdtrc(df, x))


def beta_cdf(x: Floats, a: float, b: float) -> Floats:
    return np.asarray(special.betainc(a, b, x))


def log_gamma(x: Floats | float) -> Floats:
    return np.asarray(special.gammaln(x))


def log_beta(a: Floats | float, b: Floats | float) -> Floats:
    return np.asarray(special.betaln(a, b))


def log_beta_cdf(x: float, a: Floats | float, b: Floats | float) -> Floats:
    """log P(Beta(a, b) <= x); -inf where that is too small for a float."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(special.betainc(a, b, x)))
