"""How often the statistics are wrong, counted over simulated experiments."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from server.experiment.analysis.analyse import check_guardrail
from server.experiment.analysis.compare import compare_target, select
from server.experiment.analysis.power import plan_size
from server.experiment.config import QUEUE, Stopping
from server.experiment.stats.means import compare_means, mean_ratio_bounds
from server.experiment.stats.proportions import sequential_ratio
from server.experiment.stats.quantiles import below_bounds, compare_quantiles, quantile_ratio_bounds
from server.experiment.stats.samples import TwoArmSample, sample_block_length
from tests.server.experiment.samples import SHAPES, lognormal, quantile_ranks
from tests.server.experiment.simulated import make_record, manifest, paired, switchback

ALPHA = 0.1
CHANCES = [0.5, 0.9]


def most(runs: int, alpha: float) -> int:
    """More errors than this have a chance below 1 in 1000 when alpha is true."""
    return int(binom.ppf(0.999, runs, alpha))


def misses(shape: str, n: int, runs: int, draws: int) -> np.ndarray:
    """In how many of the runs the intervals of p50, p90 and mean miss the truth: that both arms are the same."""
    rng = np.random.default_rng(sum(map(ord, shape)))
    missed = np.zeros(3, int)
    for _ in range(runs):
        sample = SHAPES[shape](n, rng)
        merged = max(sample_block_length(sample, p) for p in CHANCES)
        blocks = sample.merged(merged)
        for i, one in enumerate(compare_quantiles(blocks, CHANCES, draws, rng)):
            interval = one.difference(ALPHA)
            missed[i] += not interval.low <= 0 <= interval.high
        interval = compare_means(sample.merged(sample_block_length(sample, None))).ratio(ALPHA)
        missed[2] += not interval.low <= 1 <= interval.high
    return missed


@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_cover_on_heavy_tailed_dependent_and_discrete_latencies(shape: str) -> None:
    missed = misses(shape, 240, 60, 199)
    assert np.all(missed <= most(60, ALPHA)), missed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_cover_in_a_thousand_experiments(shape: str) -> None:
    blocks_hold_many = shape == "clustered"
    missed = misses(shape, 100 if blocks_hold_many else 400, 1000, 499)
    assert np.all(missed <= most(1000, ALPHA)), missed


def false_alarms(runs: int, pairs: int) -> tuple[int, int]:
    """Experiments in which both arms are the same, and in which a difference was found nevertheless: of the median in
    pairs, of the 90th percentile in blocks."""
    found = [0, 0]
    aa = manifest(assignment={"mode": "aa"})
    blocks = manifest(assignment={"mode": "switchback"}, primary="e2e_ms@p90")
    stopping = Stopping(alpha=ALPHA)
    rng = np.random.default_rng(1)
    for seed in range(runs):
        logs = (paired(aa, pairs, 1.0, seed), switchback(blocks, 40, pairs // 20, 1.0, seed))
        for i, (plan, log) in enumerate(zip((aa, blocks), logs, strict=True)):
            ratio = compare_target(select(plan.config, log.records), plan.config.primary, stopping, rng).ratio
            interval = ratio(ALPHA)
            found[i] += not interval.low <= 1 <= interval.high
    return found[0], found[1]


def test_a_a_experiments_raise_no_more_alarms_than_alpha() -> None:
    assert max(false_alarms(40, 60)) <= most(40, ALPHA)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_a_experiments_raise_no_more_alarms_than_alpha_in_a_thousand() -> None:
    assert max(false_alarms(1000, 100)) <= most(1000, ALPHA)


def test_bug_means_of_few_keys_of_very_unequal_sizes_raise_no_more_alarms_than_alpha() -> None:
    """Twenty users, of whom a few send most requests; each has a speed of its own."""
    rng = np.random.default_rng(3)
    alarms, runs = 0, 400
    for _ in range(runs):
        sizes = np.minimum(200, 1 + 5 * rng.pareto(1.2, 20)).astype(int)
        units = np.repeat(np.arange(20), sizes)
        values = rng.lognormal(rng.normal(0, 0.5, 20)[units], 0.5)
        in_b = units % 2 == 1
        sample = TwoArmSample((values[~in_b], values[in_b]), (units[~in_b], units[in_b]), 20)
        interval = compare_means(sample).ratio(ALPHA)
        alarms += not interval.low <= 1 <= interval.high
    assert alarms <= most(runs, ALPHA)


@pytest.mark.parametrize("rule", ["fixed", "always_valid"])
def test_sessions_that_fail_as_a_whole_break_no_guardrail(rule: str) -> None:
    """Both arms lose 30 % of their sessions of 80 requests."""
    guardrails = [{"metric": "error_rate", "max_increase": 0}]
    plan = manifest(assignment={"mode": "aa", "unit": "session"}, guardrails=guardrails, stopping={"rule": rule})
    rng = np.random.default_rng(5)
    broken = 0
    for _ in range(30):
        lost = rng.random(50) < 0.3
        records = [
            make_record(f"{key}-{i}", "ab"[key % 2], key + i / 80, 1.0, rng, 0, key=str(key))
            for key in range(50)
            for i in range(80)
        ]
        records = [replace(r, status="FAILED") if lost[int(r.key)] else r for r in records]
        (guardrail,) = plan.config.guardrails
        found = check_guardrail(guardrail, select(plan.config, records), plan.config, rng)
        broken += found.state == "broken"
    assert broken <= most(30, plan.config.stopping.alpha / 2)


@pytest.mark.parametrize("rule", ["fixed", "always_valid"])
@pytest.mark.parametrize(("blocks", "succeed", "state"), [(2, 0, "open"), (2, 1, "open"), (16, 0, "broken")])
def test_bug_one_block_that_fails_breaks_no_guardrail(rule: str, blocks: int, succeed: int, state: str) -> None:
    """The engine was away for the first block of the treatment; or for every one of many. ``succeed`` of its requests
    are answered."""
    plan = manifest(assignment={"mode": "switchback"}, stopping={"rule": rule})
    records = [
        make_record(f"{block}-{i}", arm, 20.0 * block + i / 10, 1.0, np.random.default_rng(1), 0, block=block)
        for block in range(blocks)
        for arm in [[*plan.config.arms][block % 2]]
        for i in range(80)
    ]
    away = [r.arm == list(plan.config.arms)[1] and r.arrival % 20 >= succeed / 10 for r in records]
    records = [replace(r, status="FAILED") if failed else r for r, failed in zip(records, away, strict=True)]
    guardrail = plan.config.guardrails[0]
    found = check_guardrail(guardrail, select(plan.config, records), plan.config, np.random.default_rng(1))
    assert found.state == state


@pytest.mark.parametrize("rule", ["fixed", "always_valid"])
def test_bug_few_short_waits_hold_no_guardrail_on_the_tail(rule: str) -> None:
    """Of the treatment's requests 3 % wait two seconds, which most runs of 20 pairs hardly see."""
    plan = manifest(stopping={"rule": rule})
    rng = np.random.default_rng(6)

    def waits(pairs: int, long: float) -> str:
        log = paired(plan, pairs, 1.0, seed=1)
        late = [r.arm == "auto" and rng.random() < long for r in log.records]
        took = np.where(late, 2.0, rng.lognormal(np.log(2e-4), 0.6, len(late)))
        records = [replace(r, started=r.arrival + float(s)) for r, s in zip(log.records, took, strict=True)]
        return check_guardrail(QUEUE, select(plan.config, records), plan.config, rng).state

    held = sum(waits(20, 0.03) == "held" for _ in range(30))
    assert held <= most(30, plan.config.stopping.alpha)
    assert waits(200, 0.0) == "held"  # whatever the ratio of waits below 2 ms


@pytest.mark.parametrize("load", [{"concurrency": 32}, {"rate": 4.0}])
def test_bug_pairs_of_a_turn_share_what_disturbs_it(load: dict[str, float]) -> None:
    """Each arm gets 32 requests, then the other gets the same; whatever slows a turn slows all of them by 5 %."""
    plan = manifest(assignment={"mode": "aa"}, load={"workload": "chat", **load})
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(30):
        records = []
        for pair, base in enumerate(rng.lognormal(0, 0.5, 320)):
            if pair % 32 == 0:
                slower = rng.lognormal(0, 0.05, 2)
            for arm, factor in enumerate(slower):
                at, took = pair // 32 * 100.0 + arm * 50 + pair % 32 / 32, base * factor * rng.lognormal(0, 0.03)
                records.append(make_record(f"{pair}-{arm}", "ab"[arm], at, took, rng, 0, pair=f"p{pair}"))
        interval = compare_target(select(plan.config, records), plan.config.primary, plan.config.stopping, rng)
        low, high = interval.ratio(0.05)
        assert 0 < low < high < 2
        alarms += not low <= 1 <= high
    assert alarms <= most(30, 0.05)


@pytest.mark.parametrize("outage", [False, True])
def test_bug_a_turn_whose_requests_fail_together_breaks_no_guardrail(outage: bool) -> None:
    """The treatment's server was away for one turn; or fails once in 20 requests, whatever the turn."""
    plan = manifest(load={"workload": "chat", "concurrency": 32})
    rng = np.random.default_rng(1)
    records = [
        make_record(f"{pair}-{arm}", arm, pair // 32 * 100.0 + i * 50, 1.0, rng, 0, pair=f"p{pair}")
        for pair in range(640)
        for i, arm in enumerate(plan.config.arms)
    ]
    fails = [r.arm == "auto" and (300 <= r.arrival < 400 if outage else int(r.pair[1:]) % 20 == 0) for r in records]
    records = [replace(r, status="UNAVAILABLE") if failed else r for r, failed in zip(records, fails, strict=True)]
    guardrail = plan.config.guardrails[0]
    found = check_guardrail(guardrail, select(plan.config, records), plan.config, rng)
    assert found.state == ("open" if outage else "broken")


def test_bug_units_hold_whole_turns_also_where_pairs_are_lost() -> None:
    """A unit of parts of two turns makes neighbours dependent. Five turns in a row share what slows the treatment."""
    plan = manifest(assignment={"mode": "aa"}, load={"workload": "chat", "concurrency": 8})
    rng = np.random.default_rng(9)
    records = []
    for pair, lost in enumerate(rng.random(800) < 0.2):
        turn = pair // 8
        for arm, took in enumerate((1000.0 + turn, 1000.0 + turn + 200 * (turn // 5 % 2))):
            r = make_record(f"{pair}-{arm}", "ab"[arm], turn * 1e4 + arm * 5e3, took, rng, 0, pair=f"p{pair}")
            records.append(replace(r, status="UNAVAILABLE") if lost or turn == 7 else r)
    selection = select(plan.config, records)
    sample = selection.sample("e2e_ms")
    merged = selection.merged(sample, None)
    assert merged > 8
    assert merged % 8 == 0
    for length in (8, merged):
        units = sample.merged(length)
        held = [{round(ms / 1e3) for ms in sample.values[0][units.units[0] == unit]} for unit in range(units.n_units)]
        assert all(held)
        assert sum(map(len, held)) == len(set.union(*held)) == 99


def peeking_alarms(runs: int, pairs: int) -> tuple[int, int]:
    """A/A experiments in which the interval of the median's ratio ever excluded 1, looking after every pair: with the
    confidence sequence, and with the fixed interval that is not made for it."""
    rng = np.random.default_rng(2)
    times = np.arange(1.0, pairs + 1)
    low, high = np.array([below_bounds(t, 0.5, ALPHA / 2, 100) for t in times]).T
    # the bounds on counts as ranks (from 0) of ordered values; `pairs` for no bound
    lows, highs = np.ceil(low).astype(int) - 1, np.floor(high).astype(int)
    fixed = [quantile_ranks(int(t), 0.5, ALPHA) for t in times]
    alarms = [0, 0]
    for _ in range(runs):
        a, b = lognormal(pairs, rng).values
        found = _ever_apart(a, b, list(zip(lows, highs, strict=True)))
        alarms[0] += found
        alarms[1] += _ever_apart(a, rng.permutation(b), [(low - 1, high - 1) for low, high in fixed])
    return alarms[0], alarms[1]


def _ever_apart(a: np.ndarray, b: np.ndarray, ranks: list[tuple[int, int]]) -> bool:
    seen: tuple[list[float], list[float]] = ([], [])
    for n, (x, y, (low, high)) in enumerate(zip(a, b, ranks, strict=True), start=1):
        insort(seen[0], x)
        insort(seen[1], y)
        if low >= 0 and high < n and (seen[0][low] > seen[1][high] or seen[1][low] > seen[0][high]):
            return True
    return False


def test_peeking_after_every_record_raises_no_more_alarms_than_alpha() -> None:
    sequence, _ = peeking_alarms(200, 200)
    assert sequence <= most(200, ALPHA)


@pytest.mark.slow
def test_peeking_after_every_record_in_a_thousand_experiments() -> None:
    sequence, _ = peeking_alarms(1000, 1000)
    assert sequence <= most(1000, ALPHA)


def test_the_simulation_has_the_ranks_of_the_interval() -> None:
    rng = np.random.default_rng(3)
    sample = lognormal(150, rng)
    low, high = below_bounds(150.0, 0.5, ALPHA / 2, 100)
    a, b = (np.sort(values) for values in sample.values)
    first, last = int(np.ceil(low)) - 1, int(np.floor(high))
    interval = quantile_ratio_bounds(sample, 0.5, ALPHA, 100)
    assert interval == pytest.approx((b[first] / a[last], b[last] / a[first]))


@pytest.mark.parametrize("kind", ["mean", "shares"])
def test_other_sequences_are_valid_under_peeking(kind: str) -> None:
    rng = np.random.default_rng(4)
    runs, alarms = 60, 0
    for _ in range(runs):
        if kind == "shares":
            alarms += sequential_ratio(rng.integers(0, 2, 500), (1, 1)) <= ALPHA
            continue
        sample = lognormal(400, rng)
        for n in range(50, 401, 25):
            part = type(sample)(
                (sample.values[0][:n], sample.values[1][:n]), (sample.units[0][:n], sample.units[1][:n]), n
            )
            interval = mean_ratio_bounds(compare_means(part), ALPHA, 100)
            if not interval.low <= 1 <= interval.high:
                alarms += 1
                break
    assert alarms <= most(runs, ALPHA)


def planned_power(runs: int, seed: int) -> tuple[int, float]:
    """How often a planted change of 10 % was found at the planned size, and the power that was planned."""
    plan = manifest(assignment={"mode": "aa"})
    target = plan.config.primary
    stopping = Stopping(alpha=ALPHA)
    planned = plan_size(plan, paired(plan, 250, 1.0, seed), target, stopping, 0.10, 0.8, 100)
    rng = np.random.default_rng(seed)
    hits = 0
    for run in range(runs):
        log = paired(plan, planned.units, 0.9, 1000 * seed + run + 1)
        compared = compare_target(select(plan.config, log.records), target, stopping, rng)
        hits += compared.ratio(ALPHA).high < 1
    return hits, planned.power


def test_a_planted_change_is_found_with_the_planned_power() -> None:
    hits, power = planned_power(40, 1)
    # the plan has one capture only: its own power is uncertain by a few hundredths
    assert hits >= binom.ppf(0.001, 40, power - 0.1)
    assert hits <= binom.ppf(0.999, 40, min(0.99, power + 0.1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_planted_changes_are_found_with_the_planned_power_over_many_captures() -> None:
    found = [planned_power(50, seed) for seed in range(2, 22)]
    hits, planned = sum(h for h, _ in found), np.mean([p for _, p in found])
    assert abs(hits / 1000 - planned) < 0.06
