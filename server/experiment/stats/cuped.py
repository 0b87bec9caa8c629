"""Removes from values what a covariate from before the treatment explains."""

from __future__ import annotations

import numpy as np

from server.experiment.stats.special import Floats
from server.experiment.stats.two_arm_sample import TwoArmSample


def adjust_means(sample: TwoArmSample, covariates: tuple[Floats, Floats]) -> tuple[TwoArmSample, float]:
    """The sample with values Y - theta (X - mean of X), and the share of variance that is left.

    CUPED (Deng, Xu, Kohavi & Walker, WSDM 2013), for means only; theta = cov(X, Y) / var(X) over both arms together.
    The covariates [n_a], [n_b] must not depend on the arm (prompt length, hour).
    """
    x, y = np.concatenate(covariates), np.concatenate(sample.values)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return sample, 1.0
    theta = float(np.cov(x, y)[0, 1] / np.var(x, ddof=1))
    a, b = (v - theta * (c - x.mean()) for v, c in zip(sample.values, covariates, strict=True))
    left = float(np.var(np.concatenate((a, b))) / np.var(y))
    return TwoArmSample((a, b), sample.units, sample.n_units), left
