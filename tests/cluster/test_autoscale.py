"""The number of replicas follows the load: up quickly, down slowly. On a virtual clock."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from cluster.autoscale import Memory, ReplicaLoad, ScalingRule, ServePolicy, decide, replicas_needed

PERIOD_S = 5.0
RULE = ScalingRule(1, 32, target_waiting=2, target_wait_s=1, period_s=PERIOD_S, up_after_s=5, down_after_s=300)
TICK_S = 0.1
SLOTS, SERVICE_S = 8, 2.0  # of a replica: requests at a time, and how long each takes


class VirtualFleet:
    """Replicas with a number of slots; other requests wait. The request rate is relative to a replica's capacity, with
    noise."""

    def __init__(self, replicas: int, start_s: float, rule: ScalingRule = RULE, seed: int = 1) -> None:
        self.now_s, self.waiting, self.target = 0.0, 0.0, replicas
        self.decisions: list[tuple[float, int]] = []
        self._rule, self._memory, self._start_s = rule, Memory(), start_s
        self._ready_at = [0.0] * replicas
        self._random = random.Random(seed)

    def run(self, seconds: float, rate: float) -> None:
        """Advances the clock with a request rate of ``rate`` replicas' capacity."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            serving = sum(at_s <= self.now_s for at_s in self._ready_at)
            came = max(0.0, self._random.gauss(1, 0.2)) * rate * SLOTS / SERVICE_S * TICK_S
            able = serving * SLOTS / SERVICE_S * TICK_S
            busy = min(1.0, (self.waiting + came) / able) if able else 0.0
            self.waiting = max(0.0, self.waiting + came - able)
            wait_s = self.waiting / (able / TICK_S) if able else math.inf
            loads = [ReplicaLoad(self.waiting / serving, wait_s, busy)] * serving
            target, self._memory = decide(self.now_s, loads, self.target, self._rule, self._memory)
            if target != self.target:
                self.decisions.append((self.now_s, target - self.target))
            for _ in range(target - len(self._ready_at)):
                self._ready_at.append(self.now_s + self._start_s)
            del self._ready_at[target:]
            self.target = target

    def reversals(self, within_s: float) -> int:
        """The largest number of changes of direction within such a period."""
        turns = [b[0] for a, b in itertools.pairwise(self.decisions) if a[1] * b[1] < 0]
        return max((sum(0 <= turn - first <= within_s for turn in turns) for first in turns), default=0)


@pytest.mark.parametrize("start_s", [1.0, 40.0, 150.0])
@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_three_times_the_load_adds_replicas_within_two_periods_and_only_once(replicas: int, start_s: float) -> None:
    fleet = VirtualFleet(replicas, start_s)
    fleet.run(120, 0.6 * replicas)
    assert fleet.decisions == []
    began_s = fleet.now_s
    fleet.run(1800, 1.8 * replicas)
    assert fleet.decisions[0][0] - began_s <= 2 * PERIOD_S + TICK_S
    assert fleet.decisions[0][1] > 0
    assert fleet.waiting < 2 * fleet.target
    assert 1.8 * replicas <= fleet.target <= math.ceil(1.8 * replicas * 2)
    fleet.run(1800, 0.6 * replicas)
    assert fleet.target <= math.ceil(0.6 * replicas / 0.8 * 1.6)  # the noise has its peaks
    assert fleet.reversals(300) <= 1


def test_a_fluctuating_load_keeps_its_replicas() -> None:
    fleet = VirtualFleet(2, 10.0)
    for _ in range(12):
        fleet.run(100, 3.2)
        fleet.run(100, 0.5)
    assert fleet.reversals(300) <= 1
    assert all(at_s < 800 for at_s, _ in fleet.decisions)
    assert fleet.target >= 4


def test_a_single_measurement_causes_no_change() -> None:
    high, idle = [ReplicaLoad(9, 5, 1)], [ReplicaLoad(0, 0, 0.5)]
    target, memory = decide(0, high, 1, RULE, Memory())
    assert target == 1
    target, memory = decide(5, idle, target, RULE, memory)
    target, memory = decide(10, high, target, RULE, memory)
    assert target == 1
    target, memory = decide(12, high, target, RULE, memory)
    assert target == 1  # between two looks nothing is decided
    assert decide(15, high, target, RULE, memory)[0] == 2


@pytest.mark.parametrize(
    ("load", "needed"),
    [
        (ReplicaLoad(2, 1.0, 1), 5),  # as high as it may be: full
        (ReplicaLoad(2.5, 0, 1), 5),
        (ReplicaLoad(0, 1.2, 1), 5),
        (ReplicaLoad(400, 60, 1), 8),
        (ReplicaLoad(0, 0, 0.4), 2),
        (ReplicaLoad(0, 0, 0), 0),
    ],
)
def test_replicas_needed_for_a_load(load: ReplicaLoad, needed: int) -> None:
    assert replicas_needed([load] * 4, RULE) == needed


def test_a_clock_that_is_set_back_pauses_nothing() -> None:
    memory = decide(1e9, [ReplicaLoad(0, 0, 0.5)], 1, RULE, Memory())[1]
    high = [ReplicaLoad(9, 5, 1)]
    target, memory = decide(0, high, 1, RULE, memory)
    assert target == 1
    assert decide(5, high, target, RULE, memory)[0] == 2


def test_a_short_queue_causes_no_change() -> None:
    target, memory = decide(0, [ReplicaLoad(50, 9, 1)] * 2, 2, RULE, Memory())
    for look, waiting in enumerate((50, 40, 30, 20, 10), 1):
        target, memory = decide(look * PERIOD_S, [ReplicaLoad(waiting / 2, 9, 1)] * 2, target, RULE, memory)
    assert target == 2
    target, memory = decide(30, [ReplicaLoad(10, 9, 1)] * 2, target, RULE, memory)
    assert target == 4


def test_the_bounds_hold_whatever_the_load() -> None:
    rule = ScalingRule(2, 3, 2, 1, PERIOD_S, 0, 0)
    high, idle = [ReplicaLoad(99, 99, 1)] * 3, [ReplicaLoad(0, 0, 0)] * 3
    assert decide(0, high, 3, rule, Memory())[0] == 3
    memory = decide(0, idle, 3, rule, Memory())[1]
    assert decide(10, idle, 3, rule, memory)[0] == 2
    assert decide(0, [], 7, rule, Memory())[0] == 3
    assert decide(0, [], 1, rule, Memory())[0] == 2


def test_a_replica_that_never_starts_does_not_prevent_others() -> None:
    high = [ReplicaLoad(9, 5, 1)] * 2
    target, memory, now_s = 3, Memory(), 0.0
    while target == 3 and now_s < 1000:
        target, memory = decide(now_s, high, target, RULE, memory)
        now_s += PERIOD_S
    assert target == 4
    assert now_s >= RULE.down_after_s


def test_rays_policy_uses_the_last_report_of_each_replica_and_drops_silent_ones() -> None:
    def context(now_s: float, state: dict[str, object], waiting: float) -> SimpleNamespace:
        fresh = [SimpleNamespace(timestamp=now_s - 1, value=waiting)]
        calm, old = (
            [SimpleNamespace(timestamp=now_s - 1, value=0.0)],
            [SimpleNamespace(timestamp=now_s - 99, value=0.0)],
        )
        raw = {
            "waiting": {"a": fresh, "b": fresh, "c": old},
            "wait_s": {"a": calm, "b": calm, "c": old},
            "busy": {"a": calm, "b": calm, "c": old},
        }
        return SimpleNamespace(
            policy_state=state, current_time=now_s, raw_metrics=raw, target_num_replicas=2, app_name="coder.blue"
        )

    policy = ServePolicy(**{name: getattr(RULE, name) for name in RULE.__slots__})
    target, state = policy(context(0, {}, 3.0))
    assert target == 2
    assert policy(context(5, state, 3.0))[0] == 3
    assert ServePolicy(**{name: getattr(RULE, name) for name in RULE.__slots__})(context(5, {}, 3.0))[0] == 2
    silent = SimpleNamespace(
        policy_state={}, current_time=0, raw_metrics=None, target_num_replicas=2, app_name="coder.blue"
    )
    assert policy(silent)[0] == 2
