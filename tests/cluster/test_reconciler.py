"""The reconciler: which replicas are in the fleet, which may get calls, and which are dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.autoscale import ReplicaLoad
from cluster.config import ClusterConfig
from cluster.deployment import deployment_of
from cluster.fleet import (
    Fleet,
    Replica,
    draining,
    rolled_back,
    switched,
    with_release,
    with_weights,
    without_release,
)
from cluster.reconciler import SILENT_S, Reconciler, ready
from specdec.errors import ConfigError

CONFIG = ClusterConfig.model_validate(
    {
        "models": [
            {
                "name": "coder",
                "settings": {"engine": {"target": "some"}, "server": {"log_calls": False}},
                "replicas": {"min": 2, "max": 4},
                "releases": {"blue": {}, "green": {"weight": 0, "settings": {"engine": {"dtype": "bf16"}}}},
            }
        ],
        "folder": "/nowhere",
    }
)
LOAD = ReplicaLoad(1, 0.5, 0.25)


class Reconciled:
    """A reconciler on a virtual clock, with the fleets that it wrote."""

    def __init__(self, fleet: Fleet | None = None) -> None:
        self.now_s, self.written = 0.0, list[Fleet]()
        self.reconciler = Reconciler(
            fleet or Fleet.of(CONFIG), self.written.append, interval_s=1.0, clock=lambda: self.now_s
        )

    def serving(self, release: str = "blue", fingerprint: str = "f") -> Replica:
        """A ready replica."""
        replica = ready(self.reconciler.join("coder", release, "127.0.0.1"), 81, 80, fingerprint)
        self.reconciler.beat(replica, LOAD)
        return replica

    @property
    def pool(self) -> list[str]:
        """The replicas that get calls, as written last."""
        return [replica.id for replica in self.written[-1].pool("coder", "blue")]


def test_a_replica_gets_calls_once_it_is_ready_and_none_once_it_drains() -> None:
    kept = Reconciled()
    starting = kept.reconciler.join("coder", "blue", "127.0.0.1")
    name = starting.id
    assert not kept.reconciler.beat(starting, None).drain
    assert kept.pool == []
    serving = ready(starting, 81, 80, "f")
    kept.reconciler.beat(serving, LOAD)
    assert kept.pool == [name]
    (told,) = kept.reconciler.status()["coder"]["blue"]["replicas"]
    assert (told["state"], told["http_port"], told["waiting"], told["busy"]) == ("ready", 81, 1, 0.25)
    kept.reconciler.apply(draining, name)
    assert kept.pool == []
    assert kept.reconciler.beat(serving, LOAD).drain
    assert kept.pool == []
    kept.reconciler.leave(serving)
    assert kept.reconciler.fleet.replicas == ()


def test_what_changes_nothing_is_not_written() -> None:
    kept = Reconciled()
    serving = kept.serving()
    written = len(kept.written)
    kept.reconciler.beat(serving, replace(LOAD, waiting=5))
    assert len(kept.written) == written


def test_the_place_of_one_that_died_is_taken_and_that_of_one_that_drains_is_not() -> None:
    kept = Reconciled()
    first, second = kept.serving(), kept.serving()
    assert (first.id, second.id) == ("coder.blue.0", "coder.blue.1")
    kept.reconciler.leave(first)
    assert kept.serving().id == first.id
    kept.reconciler.apply(draining, second.id)
    assert kept.serving().id == "coder.blue.2"


def test_other_numbers_are_not_let_into_a_pool() -> None:
    kept = Reconciled()
    kept.serving()
    other = ready(kept.reconciler.join("coder", "blue", "h"), 81, 80, "other")
    misfit = kept.reconciler.beat(other, LOAD).misfit
    assert "other" in misfit
    assert "f" in misfit
    assert kept.pool == ["coder.blue.0"]
    assert kept.reconciler.status()["coder"]["blue"]["replicas"][1]["state"] == "refused"
    assert kept.serving("green", "other").id == "coder.green.0"


def test_who_says_nothing_is_gone_and_comes_back_by_saying_something() -> None:
    kept = Reconciled()
    silent, lively = kept.serving(), kept.serving()
    kept.now_s = SILENT_S - 0.5
    kept.reconciler.beat(lively, LOAD)
    assert kept.reconciler.drop_silent() == []
    kept.now_s = SILENT_S + 0.5
    assert kept.reconciler.drop_silent() == [silent.id]
    assert kept.pool == [lively.id]
    kept.reconciler.beat(silent, LOAD)
    assert kept.pool == [silent.id, lively.id]


def test_who_says_something_as_often_as_it_is_to_is_not_forgotten() -> None:
    kept = Reconciled()
    replica = kept.serving()
    kept.reconciler.allow_interval(30.0)
    kept.reconciler.allow_interval(1.0)  # who was started before still takes its time
    kept.now_s = 4 * 30.0 - 1
    assert kept.reconciler.drop_silent() == []
    kept.now_s = 4 * 30.0 + 1
    assert kept.reconciler.drop_silent() == [replica.id]


def test_one_that_comes_back_when_its_place_is_taken_changes_nothing_for_its_successor() -> None:
    kept = Reconciled()
    former = kept.serving()
    kept.now_s = SILENT_S + 0.5
    kept.reconciler.drop_silent()
    successor = ready(kept.reconciler.join("coder", "blue", "127.0.0.1"), 91, 90, "f")
    kept.reconciler.beat(successor, LOAD)
    assert successor.id == former.id
    assert kept.reconciler.beat(former, LOAD).drain
    kept.reconciler.retire(former)
    kept.reconciler.leave(former)
    assert kept.reconciler.fleet.replicas == (successor,)
    assert kept.pool == [successor.id]
    kept.now_s = 2 * SILENT_S + 1
    kept.reconciler.beat(former, LOAD)
    assert kept.reconciler.drop_silent() == [successor.id]


def test_one_that_is_not_known_any_more_can_end() -> None:
    kept = Reconciled()
    replica = kept.serving()
    kept.now_s = SILENT_S + 0.5
    kept.reconciler.drop_silent()
    kept.reconciler.retire(replica)
    kept.reconciler.leave(replica)
    assert kept.reconciler.fleet.replicas == ()


def test_a_restarted_reconciler_continues_with_the_fleet_and_drops_silent_replicas() -> None:
    former = Reconciled()
    lively, silent = former.serving(), former.serving()
    kept = Reconciled(former.reconciler.fleet)
    assert kept.pool == [lively.id, silent.id]
    kept.now_s = SILENT_S + 0.5
    kept.reconciler.beat(lively, LOAD)
    assert kept.reconciler.drop_silent() == [silent.id]


def test_sessions_move_between_releases_and_back() -> None:
    kept = Reconciled()
    kept.serving()
    with pytest.raises(ConfigError, match="no replica that is ready"):
        kept.reconciler.apply(switched, "coder", "green")
    kept.serving("green", "other")

    def weights() -> dict[str, int]:
        return {name: release["weight"] for name, release in kept.reconciler.status()["coder"].items()}

    kept.reconciler.apply(with_weights, "coder", {"green": 5, "blue": 95})
    assert weights() == {"blue": 95, "green": 5}
    kept.reconciler.apply(switched, "coder", "green")
    assert weights() == {"blue": 0, "green": 100}
    kept.reconciler.apply(rolled_back, "coder")
    assert weights() == {"blue": 95, "green": 5}


@pytest.mark.parametrize(
    ("method", "words", "named"),
    [("join", ("coder", "red", "h"), "'red'"), ("apply", (draining, "coder.blue.9"), "'coder.blue.9'")],
)
def test_an_unknown_release_or_replica_is_named(method: str, words: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}; there are"):
        getattr(Reconciled().reconciler, method)(*words)


def test_a_release_that_is_over_leaves() -> None:
    kept = Reconciled()
    kept.reconciler.apply(with_release, "coder", "red")
    assert [*kept.reconciler.status()["coder"]] == ["blue", "green", "red"]
    with pytest.raises(ConfigError, match="weight 0 first"):
        kept.reconciler.apply(without_release, "coder", "blue")
    kept.reconciler.apply(without_release, "coder", "red")
    assert [*kept.reconciler.status()["coder"]] == ["blue", "green"]


def test_a_deployment_is_another_version_where_its_replicas_would_be_others() -> None:
    blue, green = (deployment_of(CONFIG, "coder", name) for name in ("blue", "green"))
    assert green.settings == {"engine": {"target": "some", "dtype": "bf16"}, "server": {"log_calls": False}}
    assert blue.version != green.version
    assert blue.scaled(3, 7).version == blue.version
    assert blue.restarted().version != blue.version
    assert (blue.rule.low, blue.rule.high) == (2, 4)
    assert (blue.scaled(3, 3).rule.low, blue.scaled(3, 3).rule.high) == (3, 3)
    for low, high in ((0, 1), (3, 2)):
        with pytest.raises(ConfigError, match="replicas"):
            blue.scaled(low, high)
