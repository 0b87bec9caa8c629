"""The formulas against scipy, tea-tasting, published values and definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats.mstats import hdquantiles

from server.experiment.stats import samples
from server.experiment.stats.means import compare_means
from server.experiment.stats.proportions import (
    chi_square_ratio,
    equivalent,
    holm,
    sequential_ratio,
    share_bounds,
    share_difference,
    share_difference_bounds,
)
from server.experiment.stats.quantiles import (
    QuantileComparison,
    band_half_width,
    below_bounds,
    compare_quantiles,
    cumulated_shares,
    harrell_davis,
    quantile_bounds,
)
from server.experiment.stats.samples import ANY_RATIO, Interval, TwoArmSample, block_length, unit_counts
from tests.server.experiment.samples import clustered, lognormal, paired_sample, quantile_ranks

RNG = np.random.default_rng


@given(st.integers(8, 400), st.floats(0.01, 0.99), st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=100, deadline=None)
def test_a_quantile_is_bounded_where_exact_ranks_bound_it(n: int, p: float, alpha: float) -> None:
    low, high = quantile_ranks(n, p, alpha)
    draws = np.ones(2)
    bounds = QuantileComparison(1.0, 1.0, p, draws, draws, (n, n), n).ratio(alpha)
    assert (bounds != ANY_RATIO) == (low >= 1 and high <= n)


def test_quantiles_that_the_data_do_not_bound_have_infinite_ends() -> None:
    values = np.arange(50.0)
    sample = paired_sample(values, values)
    assert compare_quantiles(sample, [0.99], 50, RNG(0))[0].ratio(0.05) == (0.0, math.inf)
    few = paired_sample(values[:7], values[:7])
    assert compare_quantiles(few, [0.5], 50, RNG(0))[0].p_value() == 1.0
    assert compare_means(few).difference(0.05) == (-math.inf, math.inf)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_harrell_davis_is_scipys_also_for_values_drawn_several_times(p: float) -> None:
    rng = RNG(2)
    values = np.sort(rng.lognormal(size=300))
    once = harrell_davis(values, cumulated_shares(np.ones((1, 300))), p)[0]
    assert once == pytest.approx(float(hdquantiles(values, prob=[p])[0]), rel=2e-3)
    counts = rng.multinomial(300, np.full(300, 1 / 300))
    several = harrell_davis(values, cumulated_shares(counts[None]), p)[0]
    assert several == pytest.approx(float(hdquantiles(np.repeat(values, counts), prob=[p])[0]), rel=2e-3)


@pytest.mark.parametrize("p", [0.2, 0.9])
def test_harrell_davis_of_few_values_is_scipys(p: float) -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    ours = harrell_davis(values, cumulated_shares(np.ones((1, 8))), p)[0]
    assert ours == pytest.approx(float(hdquantiles(values, prob=[p])[0]), rel=2e-3)


def test_bootstrap_of_a_quantile_difference_agrees_with_scipys() -> None:
    sample = lognormal(200, RNG(3))
    ours = compare_quantiles(sample, [0.5], 4000, RNG(4))[0].difference(0.1)

    def statistic(a: np.ndarray, b: np.ndarray) -> float:
        return float(hdquantiles(b, prob=[0.5])[0] - hdquantiles(a, prob=[0.5])[0])

    data = tuple(sample.values)
    theirs = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=600,
        method="percentile",
        confidence_level=0.9,
        rng=5,
    ).confidence_interval
    width = theirs.high - theirs.low
    assert abs(ours.low - theirs.low) < 0.12 * width
    assert abs(ours.high - theirs.high) < 0.12 * width


def test_means_of_normal_pairs_agree_with_the_paired_t_test() -> None:
    rng = RNG(6)
    a = rng.normal(100, 10, 120)
    sample = paired_sample(a, a * 0.97 + rng.normal(0, 8, 120))
    ours = compare_means(sample)
    theirs = stats.ttest_rel(sample.values[1], sample.values[0])
    interval = theirs.confidence_interval(0.95)
    assert ours.difference(0.05) == pytest.approx((interval.low, interval.high))
    assert ours.p_value() == pytest.approx(theirs.pvalue)
    # Fieller's interval holds the ratios that the test of b - r a does not reject
    for end in ours.ratio(0.05):
        assert stats.ttest_rel(sample.values[1], end * a).pvalue == pytest.approx(0.05)


def test_ratio_of_means_agrees_with_tea_tasting() -> None:
    tea = pytest.importorskip("tea_tasting")
    import pyarrow

    rng = RNG(7)
    n = 400
    x = rng.lognormal(4, 0.6, n)
    arm = np.arange(n) % 2
    y = 20 + 0.5 * x * np.where(arm == 1, 0.93, 1.0) + rng.normal(0, 4, n)
    table = pyarrow.table({"variant": arm, "y": y})
    want = tea.Experiment(plain=tea.Mean("y")).analyze(table)["plain"]
    order = np.arange(n)
    sample = TwoArmSample((y[arm == 0], y[arm == 1]), (order[arm == 0], order[arm == 1]), n)
    ours = compare_means(sample)
    width = want.effect_size_ci_upper - want.effect_size_ci_lower
    assert ours.b - ours.a == pytest.approx(want.effect_size, abs=0.01 * width)
    assert abs(ours.difference(0.05).low - want.effect_size_ci_lower) < 0.01 * width
    assert abs(ours.difference(0.05).high - want.effect_size_ci_upper) < 0.01 * width
    relative = ours.ratio(0.05)
    span = want.rel_effect_size_ci_upper - want.rel_effect_size_ci_lower
    assert abs(relative.low - 1 - want.rel_effect_size_ci_lower) < 0.03 * span
    assert abs(relative.high - 1 - want.rel_effect_size_ci_upper) < 0.03 * span


def test_sample_ratio_is_scipys_chi_square_and_tea_tastings() -> None:
    assert chi_square_ratio((520, 480), (1, 1)) == pytest.approx(stats.chisquare([520, 480]).pvalue)
    assert chi_square_ratio((300, 640), (1, 2)) == pytest.approx(
        stats.chisquare([300, 640], [940 / 3, 1880 / 3]).pvalue
    )
    tea = pytest.importorskip("tea_tasting")
    import pyarrow

    table = pyarrow.table({"variant": [0] * 560 + [1] * 440})
    found = tea.Experiment(ratio=tea.SampleRatio(method="norm", correction=False)).analyze(table)["ratio"]
    assert chi_square_ratio((560, 440), (1, 1)) == pytest.approx(found.pvalue, rel=1e-6)


def test_sequential_sample_ratio_finds_a_mismatch_and_is_an_inverse_likelihood_ratio() -> None:
    arms = (RNG(9).random(4000) < 0.56).astype(int)
    assert sequential_ratio(arms, (1, 1)) < 0.001
    one_arm = np.zeros(3, np.int64)
    # beta-binomial by hand: B(50 + 3, 50) / B(50, 50) / 0.5^3
    by_hand = 50 / 100 * 51 / 101 * 52 / 102 / 0.5**3
    assert sequential_ratio(one_arm, (1, 1)) == pytest.approx(1 / by_hand)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_agrees_with_its_definition(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for alpha in (0.01, 0.05, 0.3):
        rejected = []
        for rank, p in enumerate(sorted(p_values)):
            if p * (len(p_values) - rank) > alpha:
                break
            rejected.append(p)
        assert sum(p <= alpha for p in adjusted) == len(rejected)


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_intervals_of_shares_have_published_values() -> None:
    # Newcombe 1998, table II: 56/70 - 48/80 by method 10
    assert share_difference((48, 56), (80, 70), 0.05) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    # and 0/10 of 10/10
    assert share_difference((0, 10), (10, 10), 0.05) == pytest.approx((0.6075, 1.0), abs=1e-4)


def test_the_sequence_for_a_share_is_valid_on_every_path_and_inverts_its_likelihood() -> None:
    alive = np.array([1.0])
    for n in range(1, 120):
        alive = np.append(alive * 0.9, 0) + np.append(0, alive * 0.1)
        for hits in range(n + 1):
            if alive[hits] > 1e-9:
                interval = share_bounds(hits, n, 0.1)
                alive[hits] *= interval.low <= 0.1 <= interval.high
                exact = stats.binomtest(hits, n).proportion_ci(0.9)
                assert interval.low <= exact.low + 1e-9
                assert interval.high >= exact.high - 1e-9
    assert 0.9 <= alive.sum() < 0.999
    assert share_bounds(0, 0, 0.1) == (0.0, 1.0)
    # no hit in 100: (1 - p)^100 = alpha B(1, 101)
    assert share_bounds(0, 100, 0.05).high == pytest.approx(1 - (0.05 / 101) ** 0.01, abs=1e-6)
    assert share_difference_bounds((0, 30), (100, 100), 0.05).low > 0


def test_equivalence_needs_the_wider_of_two_levels_inside_the_margin() -> None:
    requested: list[float] = []

    def ratio(alpha: float) -> Interval:
        requested.append(alpha)
        return Interval(0.99, 1.015)

    assert equivalent(ratio, 0.02, 0.05)
    assert not equivalent(ratio, 0.01, 0.05)
    assert requested == [0.1, 0.1]
    assert not equivalent(lambda alpha: Interval(1.0, 1.0), 0.0, 0.05)


def test_bounds_of_a_sequence_enclose_the_exact_ones_and_are_valid_on_every_path() -> None:
    times = np.arange(1.0, 300.0)
    low, high = np.array([below_bounds(t, 0.3, 0.05, 200) for t in times]).T
    fixed = np.array([quantile_ranks(int(t), 0.3, 0.05) for t in times])
    assert np.all(low <= fixed[:, 0])
    assert np.all(high >= fixed[:, 1] - 1)
    # The exact chance of leaving the bounds, by dynamic programming over all paths.
    alive = np.array([1.0])
    for t, least, most in zip(times, low, high, strict=True):
        alive = np.append(alive * 0.7, 0) + np.append(0, alive * 0.3)
        sums = np.arange(int(t) + 1)
        alive[(sums < least - 1e-9) | (sums > most + 1e-9)] = 0
    assert 0.95 <= alive.sum() < 0.995


def test_bounds_of_a_quantile_invert_the_counts_also_with_ties() -> None:
    values = np.array([1.0, 2.0, 2.0, 2.0, 3.0] * 40)
    interval = quantile_bounds(values, np.arange(200), 0.5, 0.05, 200)
    assert interval == (2.0, 2.0)
    assert quantile_bounds(values[:3], np.arange(3), 0.5, 0.05, 200) == (-math.inf, math.inf)


def test_units_are_drawn_whole_and_by_arm_if_each_has_one() -> None:
    sample = clustered(31, RNG(10))
    counts = np.concatenate(list(unit_counts(sample, 100, RNG(11))))
    a, b = sample.present()
    assert counts.shape == (100, 31)
    assert np.all(counts[:, a].sum(axis=1) == a.sum())
    assert np.all(counts[:, b].sum(axis=1) == b.sum())


def test_block_length_is_one_for_noise_and_grows_with_dependence() -> None:
    rng = RNG(12)
    noise = rng.normal(size=(20, 2000))
    assert np.median([block_length(row) for row in noise]) == 1
    lengths = []
    for phi in (0.3, 0.8):
        row, out = 0.0, []
        for shock in noise[0]:
            row = phi * row + shock
            out.append(row)
        lengths.append(block_length(np.array(out)))
    assert 1 < lengths[0] < lengths[1]
    assert block_length(np.ones(100)) == 1


def test_the_band_holds_the_whole_distribution() -> None:
    rng = RNG(13)
    half = band_half_width(100, 0.1)
    missed = sum(stats.kstest(rng.random(100), "uniform").statistic > half for _ in range(400))
    assert missed <= stats.binom.ppf(0.999, 400, 0.1)
    assert missed >= 10


def test_bug_draws_without_an_arm_do_not_spoil_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of merged units, most may have one arm only; a draw may then miss the other."""
    rng = np.random.default_rng(0)
    units = (np.arange(60), np.arange(0, 60, 7))
    sample = TwoArmSample((rng.lognormal(size=60), rng.lognormal(size=9)), units, 60)
    (compared,) = compare_quantiles(sample, [0.5], 20_000, rng)
    assert 15_000 < len(compared.draws_a) < 20_000
    low, high = compared.ratio(0.1)
    assert 0 < low < compared.b / compared.a < high < np.inf
    assert 0 < compared.p_value() <= 1
    one = TwoArmSample((np.ones(60), np.ones(1)), (np.arange(60), np.array([0])), 60)
    monkeypatch.setattr(samples, "_CHUNK", 1)  # every draw is a chunk, of which some have no value of B
    assert len(compare_quantiles(one, [0.5], 50, rng)[0].draws_b) < 50
