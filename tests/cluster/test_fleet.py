"""Which replicas get calls: pools of one fingerprint, weights of releases, switch and rollback, canaries offline."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import xxhash

from cluster.config import ClusterConfig
from cluster.fleet import (
    Fleet,
    Replica,
    ReplicaState,
    draining,
    rolled_back,
    switched,
    with_release,
    with_replica,
    with_weights,
    without_release,
    without_replica,
)
from specdec.errors import ConfigError
from tests.cluster.calls import release_of

READY = ReplicaState.READY
SHARES = [("green", 10), ("blue", 90)]


def replica(name: str, release: str = "blue", fingerprint: str = "int8-avx512", state: ReplicaState = READY) -> Replica:
    return Replica(name, "coder", release, "10.0.0.1", 9001, 9000, fingerprint, state)


def fleet_of(*replicas: Replica) -> Fleet:
    fleet = Fleet.of(ClusterConfig.model_validate({"models": [{"name": "coder"}]}))
    fleet = with_release(fleet, "coder", "green")
    for each in replicas:
        fleet = with_replica(fleet, each)
    return fleet


def pool(fleet: Fleet, release: str = "blue") -> list[str]:
    return [each.id for each in fleet.release("coder", release).pool]


def live(fleet: Fleet) -> tuple[str, str]:
    """The live release and its fingerprint."""
    name = fleet.live("coder")
    return name, fleet.release("coder", name).fingerprint


def test_only_ready_replicas_get_calls() -> None:
    fleet = fleet_of(replica("a"), replica("b", fingerprint="", state=ReplicaState.STARTING), replica("c"))
    assert pool(fleet) == ["a", "c"]
    assert pool(draining(fleet, "a")) == ["c"]
    assert pool(with_replica(fleet, replica("b"))) == ["a", "b", "c"]
    assert pool(without_replica(fleet, "c")) == ["a"]


def test_a_pool_has_one_fingerprint_and_accepts_another_only_when_empty() -> None:
    fleet = fleet_of(replica("a"), replica("b", fingerprint="int8-neon"), replica("g", "green", "int8-neon"))
    assert pool(fleet) == ["a"]
    assert [misfit.id for misfit in fleet.release("coder", "blue").misfits] == ["b"]
    assert pool(draining(fleet, "a")) == []  # a's open streams must be able to resume
    alone = without_replica(fleet, "a")
    assert pool(alone) == ["b"]
    assert alone.release("coder", "blue").misfits == ()
    assert pool(fleet, "green") == ["g"]
    empty = without_replica(alone, "b")
    assert empty.release("coder", "blue").fingerprint == ""


def test_a_replica_needs_a_release() -> None:
    with pytest.raises(ConfigError, match="no release 'red'; there are: blue, green"):
        fleet_of(replica("a", "red"))
    with pytest.raises(ConfigError, match="no model 'other'"):
        fleet_of(replace(replica("a"), model="other"))


def test_canary_promotion_and_rollback() -> None:
    fleet = fleet_of(replica("a"), replica("g", "green", "bf16"))
    assert fleet.shares("coder") == [("blue", 100)]
    canary = with_weights(fleet, "coder", {"blue": 90, "green": 10})
    assert canary.shares("coder") == [("green", 10), ("blue", 90)]
    assert live(canary) == ("blue", "int8-avx512")
    green = switched(canary, "coder", "green")
    assert green.shares("coder") == [("green", 100)]
    assert live(green) == ("green", "bf16")
    assert rolled_back(green, "coder") == replace(canary, earlier=rolled_back(green, "coder").earlier)
    assert rolled_back(rolled_back(green, "coder"), "coder").shares("coder") == [("green", 100)]


def test_the_share_of_a_dead_release_goes_to_the_live_one_and_moves_no_other_session() -> None:
    fleet = with_weights(fleet_of(replica("a"), replica("g", "green")), "coder", {"blue": 90, "green": 10})
    assert without_replica(fleet, "g").shares("coder") == [("blue", 10), ("blue", 90)]
    assert without_replica(fleet, "a").shares("coder") == [("green", 10), ("green", 90)]


def test_no_call_is_routed_to_a_release_without_replicas() -> None:
    fleet = fleet_of(replica("a"))
    with pytest.raises(ConfigError, match="coder/green has no replica that is ready"):
        switched(fleet, "coder", "green")
    with pytest.raises(ConfigError, match="coder/green has no replica that is ready"):
        with_weights(fleet, "coder", {"blue": 10_000, "green": 1})  # however small its share
    with pytest.raises(ConfigError, match="there is nothing to go back to"):
        rolled_back(fleet, "coder")
    with pytest.raises(ConfigError, match="every release would have the weight 0"):
        with_weights(fleet, "coder", {"blue": 0})
    green = switched(with_replica(fleet, replica("g", "green")), "coder", "green")
    with pytest.raises(ConfigError, match="coder/blue has no replica"):
        rolled_back(without_replica(green, "a"), "coder")


def test_a_release_ends_without_replicas() -> None:
    fleet = fleet_of(replica("a"), replica("g", "green"))
    with pytest.raises(ConfigError, match="has 100 of the sessions"):
        without_release(fleet, "coder", "blue")
    green = switched(fleet, "coder", "green")
    with pytest.raises(ConfigError, match="has replicas"):
        without_release(green, "coder", "blue")
    over = without_release(without_replica(green, "a"), "coder", "blue")
    assert [*over.releases["coder"]] == ["green"]
    with pytest.raises(ConfigError, match="nothing to go back to"):
        rolled_back(over, "coder")


def test_the_arm_is_xxh64_modulo_the_weights_in_the_order_of_the_shares() -> None:
    assert xxhash.xxh64_intdigest(b"abc") == 0x44BC2CF5AD770999  # the algorithm's own test vector
    assert 0x44BC2CF5AD770999 % 100 == 49
    assert release_of("abc", [("green", 49), ("blue", 51)]) == "blue"
    assert release_of("abc", [("green", 50), ("blue", 50)]) == "green"
    assert release_of("größe", SHARES) == release_of("größe", SHARES)


def test_a_growing_canary_keeps_its_sessions() -> None:
    keys = [f"session-{i}" for i in range(4000)]
    small = {key for key in keys if release_of(key, SHARES) == "green"}
    large = {key for key in keys if release_of(key, [("green", 30), ("blue", 70)]) == "green"}
    assert small < large
    counts = Counter(release_of(key, SHARES) for key in keys)
    assert counts["green"] == pytest.approx(400, abs=80)
