"""Samples of two arms from distributions that latencies are like."""

from __future__ import annotations

import numpy as np
from scipy import stats

from server.experiment.stats.samples import Floats, TwoArmSample


def paired_sample(a: Floats, b: Floats) -> TwoArmSample:
    """One value per arm and unit."""
    units = np.arange(len(a))
    return TwoArmSample((a, b), (units, units), len(a))


def lognormal(n: int, rng: np.random.Generator) -> TwoArmSample:
    """Heavy-tailed; pairs go together."""
    base = rng.normal(0, 1, n)
    return paired_sample(*(np.exp(base + rng.normal(0, 0.5, n)) for _ in range(2)))


def pareto(n: int, rng: np.random.Generator) -> TwoArmSample:
    """Of infinite third moment; arms independent."""
    return paired_sample(*(rng.pareto(2.5, n) + 1 for _ in range(2)))


def autocorrelated(n: int, rng: np.random.Generator, phi: float = 0.6) -> TwoArmSample:
    """Each unit is like the one before; arms independent."""
    state = np.zeros(2)
    rows = []
    for shock in rng.normal(size=(n + 20, 2)):
        state = phi * state + shock
        rows.append(np.exp(0.3 * state))
    a, b = np.array(rows[20:]).T
    return paired_sample(a, b)


def discrete(n: int, rng: np.random.Generator) -> TwoArmSample:
    """A few values only, zero among them, as gaps between tokens have when steps yield several."""
    return paired_sample(*(rng.choice([0.0, 0.0, 9.0, 10.0, 11.0, 21.0], n) for _ in range(2)))


def clustered(n: int, rng: np.random.Generator) -> TwoArmSample:
    """Blocks of one arm each, of unequal size, whose values share a disturbance."""
    values: tuple[list[Floats], list[Floats]] = ([], [])
    units: tuple[list[Floats], list[Floats]] = ([], [])
    for block in range(n):
        size = int(rng.integers(5, 40))
        values[block % 2].append(rng.lognormal(0, 0.5, size) * rng.lognormal(0, 0.2))
        units[block % 2].append(np.full(size, block))
    (a, b), (units_a, units_b) = (tuple(map(np.concatenate, x)) for x in (values, units))
    return TwoArmSample((a, b), (units_a, units_b), n)


SHAPES = {f.__name__: f for f in (lognormal, pareto, autocorrelated, discrete, clustered)}


def quantile_ranks(n: int, p: float, alpha: float) -> tuple[int, int]:
    """Ranks (1-based) of the two order statistics that enclose the p-quantile with chance >= 1 - alpha.

    The number of values below a quantile is binomial (David & Nagaraja, Order Statistics, 3rd ed., 7.1); each side gets
    alpha / 2. Rank 0 is minus, rank n + 1 plus infinity: n is too small for a bound.
    """
    below = stats.binom(n, p)
    return int(below.ppf(alpha / 2)), int(below.ppf(1 - alpha / 2)) + 1
