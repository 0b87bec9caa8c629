"""A fleet: the same for the same seed, better with more replicas, and routed as Envoy routes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.envoy import EnvoyFiles
from cluster.fleet import Fleet
from cluster.plan.arrivals import PlannedRequest, Traffic, drawn_requests
from cluster.plan.simulate import BoundedRing, FleetPlan, simulate
from cluster.plan.sizing import Goal, least_replicas
from specdec.load.arrivals import Arrivals
from specdec.load.request import Objective
from tests.cluster.envoy_fleet import write_fleet
from tests.cluster.plan.profiles import profile

NOISY = profile().model_copy(update={"noise": (0.5, 1.0, 1.5)})
GOAL = Goal((Objective("ttft", 150.0), Objective("tpot", 20.0)), 0.95)


def load(rate: float = 25.0, seed: int = 0, seconds: float = 8.0) -> list[PlannedRequest]:
    traffic = Traffic(300, 20, shared_tokens=64, sessions=12, session_tokens=128)
    return drawn_requests(Arrivals(rate, seconds), traffic, seed)


def test_a_seed_determines_the_plan() -> None:
    plan = FleetPlan(NOISY, 3, seed=1)
    first, again = (simulate(plan, load()).as_dict() for _ in range(2))
    other = simulate(dataclasses.replace(plan, seed=2), load()).as_dict()
    assert first == again
    assert first != other
    assert load() == load()
    assert load(seed=1) != load()


def test_more_replicas_are_never_worse() -> None:
    requests = drawn_requests(
        Arrivals(25.0, 8.0), Traffic(300, 20), 0
    )  # the shared prefix, which more replicas would lose
    found = [simulate(FleetPlan(profile(), replicas), requests).as_dict() for replicas in (1, 2, 4, 8)]
    for metric in ("ttft_ms", "e2e_ms"):
        for quantile in ("p50", "p99"):
            values = [figures["latency"][metric][quantile] for figures in found]
            assert values == sorted(values, reverse=True)


def test_the_fewest_replicas_that_meet_the_objective() -> None:
    said: list[str] = []
    found = least_replicas(FleetPlan(NOISY, 1), load(), GOAL, 64, said.append)
    assert found is not None
    replicas = found.plan.replicas
    assert replicas > 1
    tried = {int(line.partition(" ")[0]): line.partition(": ")[2] for line in said}
    assert tried[replicas - 1].startswith("too few, ")
    assert tried[replicas] == f"enough, {GOAL.share_in(found):.2%} of all {len(load())} requests meet it"
    assert GOAL.share_in(found) >= GOAL.share
    assert GOAL.share_in(simulate(FleetPlan(NOISY, replicas - 1), load())) < GOAL.share


def test_no_number_of_replicas_meets_what_one_request_alone_misses() -> None:
    goal = Goal((Objective("ttft", 5.0),))
    assert least_replicas(FleetPlan(NOISY, 1), load(seconds=1.0), goal, 3) is None


def test_a_hopeless_fleet_is_not_simulated_to_its_end() -> None:
    requests = load(rate=60.0)
    whole = simulate(FleetPlan(NOISY, 1), requests)
    broken_off = simulate(FleetPlan(NOISY, 1), requests, lambda record: record.ttft_ms > 500)
    assert whole.whole
    assert not broken_off.whole
    assert broken_off.steps < whole.steps / 2


def test_a_returning_client_finds_its_prefix_on_the_same_replica() -> None:
    named, unnamed = load(), [dataclasses.replace(one, session="") for one in load()]
    one, routed, scattered = (
        simulate(FleetPlan(profile(), replicas), requests).prefix_hit_rate
        for replicas, requests in ((1, named), (4, named), (4, unnamed))
    )
    assert routed > 0.9 * one
    assert scattered < routed


def test_a_cache_salt_does_not_choose_the_replica() -> None:
    """A server with keys gives every request of a tenant the same salt, which Envoy does not see."""
    requests = [dataclasses.replace(one, session="", salt="tenant-7/") for one in load(rate=4.0)]
    assert min(simulate(FleetPlan(profile(), 4), requests).by_replica) > 0


def test_a_session_stays_on_one_replica_until_that_is_full() -> None:
    router, idle = BoundedRing(8, seed=0), [0] * 8
    home = router.choose("alice", idle)
    assert {router.choose("alice", idle) for _ in range(20)} == {home}
    assert len({router.choose(f"session {n}", idle) for n in range(200)}) == 8
    busy = list(idle)
    busy[home] = 2  # (2 + 1) * 1.25 = 3.75 requests: one for each of eight replicas, rounded up
    other = router.choose("alice", busy)
    assert other != home
    assert router.choose("alice", busy) == other
    busy[home] = 1  # as much as its share is not more
    assert router.choose("alice", busy) == home


def test_the_planned_ring_equals_envoys(tmp_path: Path) -> None:
    config, files = ClusterConfig.model_validate({"models": [{"name": "coder"}]}), EnvoyFiles(tmp_path)
    write_fleet(config, Fleet.of(config), files)
    clusters = json.loads(files.clusters.read_text())["resources"]
    rings = {each["ring_hash_lb_config"]["minimum_ring_size"] for each in clusters if each["lb_policy"] == "RING_HASH"}
    assert rings == {len(BoundedRing(4, seed=0)._points)}


def test_no_replica_exceeds_its_share_while_another_has_capacity() -> None:
    router, active = BoundedRing(4, seed=0), [0] * 4
    for number in range(400):
        at = router.choose(f"{number % 3}", active)  # three sessions: four homes at most
        active[at] += 1
        assert active[at] <= -(-((sum(active)) * 125 + 99) // 100 // 4) + 1
    assert max(active) <= 1.3 * 100


def test_requests_without_a_key_go_to_the_less_busy_of_two() -> None:
    router = BoundedRing(8, seed=0)
    assert {router.choose("", [9] * 7 + [0]) for _ in range(200)} > {7}
    assert BoundedRing(2, seed=0).choose("", [3, 2]) == 1
    assert {BoundedRing(2, seed).choose("", [0, 0]) for seed in range(20)} == {0, 1}
    assert BoundedRing(1, seed=0).choose("", [3]) == 0
