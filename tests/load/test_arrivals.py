"""When requests arrive: the distribution of the gaps, and invalid schedules."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.experiment.plan import arrival_times
from server.experiment.config import Load
from specdec.errors import ConfigError
from specdec.load.arrivals import Arrivals, shape_of

rates = st.floats(0.5, 200)
LONG_S = 400.0


@given(rates, st.floats(0.1, 60), st.sampled_from([None, 0.25, 1.0, 4.0]), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_offsets_ascend_within_the_run_and_repeat(rate: float, duration: float, shape: float | None, seed: int) -> None:
    arrivals = Arrivals(rate, duration, shape)
    offsets = arrivals.offsets(seed)
    assert offsets == arrivals.offsets(seed)
    assert all(a <= b for a, b in itertools.pairwise(offsets))
    assert all(0 <= offset <= duration * (1 + 1e-9) for offset in offsets)
    if shape is None:
        assert len(offsets) == int(np.ceil(arrivals.expected))


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_follow_their_distribution(shape: float) -> None:
    gaps = np.diff(Arrivals(20, LONG_S, shape=shape).offsets(3))
    assert stats.kstest(gaps, stats.gamma(shape, scale=1 / (20 * shape)).cdf).pvalue > 0.01


def test_gaps_of_a_poisson_process_are_exponential() -> None:
    assert stats.kstest(np.diff(Arrivals(20, LONG_S).offsets(5)), stats.expon(scale=1 / 20).cdf).pvalue > 0.01


def test_even_arrivals() -> None:
    assert Arrivals(4, 2, shape=None).offsets(0) == [i / 4 for i in range(8)]


@pytest.mark.parametrize("bad", [{"shape": float("nan")}, {"rate": 1_000_001}])
def test_invalid_schedules_are_rejected(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Arrivals(**({"rate": 1.0, "duration_s": 1.0} | bad))


@pytest.mark.parametrize("shape", [0.0, 1e-300, 1e-9, float("nan")])
def test_bug_a_shape_with_which_all_requests_arrive_at_once_is_rejected(shape: float) -> None:
    with pytest.raises(ConfigError, match=r"shape must be at least 0\.001"):
        Arrivals(1.0, 1.0, shape_of("gamma", shape))
    assert shape_of("poisson", shape) == 1.0


POISSON = {0: 0.01375185158475498, 1: 0.062458960781467954, 1500: 191.57330364597453}
BURSTS = {0: 2.690683287469763e-05, 1: 0.2124935238533253, 1500: 184.95588212484125}


@pytest.mark.parametrize(("name", "expected", "count"), [("poisson", POISSON, 8061), ("gamma", BURSTS, 8335)])
def test_a_seed_keeps_its_arrivals(name: Literal["poisson", "gamma"], expected: dict[int, float], count: int) -> None:
    """A run that another release began goes on with the same ones."""
    offsets = Arrivals(8.0, 1000.0, shape_of(name, 0.25)).offsets(3)
    load = Load(workload="chat", rate=8.0, arrivals=name, shape=0.25, seed=3)
    of_plans = list(itertools.islice(arrival_times(load), count))
    assert len(offsets) == count
    assert {i: offsets[i] for i in expected} == pytest.approx(expected, rel=1e-12)
    assert of_plans == pytest.approx(offsets, rel=1e-12)
