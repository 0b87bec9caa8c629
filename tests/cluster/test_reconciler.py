"""The reconciler: which replicas are in the fleet, which may get calls, and which are dropped."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.autoscale import ReplicaLoad
from cluster.config import ClusterConfig
from cluster.deployment import deployment_of
from cluster.fleet import (
    Fleet,
    Replica,
    ReplicaState,
    draining,
    rolled_back,
    switched,
    with_release,
    with_weights,
    without_release,
)
from cluster.reconciler import SILENT_PERIODS, FleetWriteError, Reconciler, ready
from cluster.state_folder import FleetState
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
    """A reconciler on a virtual clock, with the fleets that it wrote to a disk that may be full."""

    def __init__(self, fleet: Fleet | None = None) -> None:
        self.now_s, self.written, self.disk_is_full, self.write_s = 0.0, list[Fleet](), False, 0.0
        state = FleetState(config=CONFIG, deployments={}, fleet=fleet or Fleet.of(CONFIG))
        self.reconciler = Reconciler(state, self._write, clock=lambda: self.now_s)

    def _write(self, state: FleetState) -> None:
        self.now_s += self.write_s
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written.append(state.fleet)

    def pass_time(self, seconds: float, *replicas: Replica) -> None:
        """Calls the reconciler twice per period, with heartbeats of ``replicas``."""
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            self.reconciler.reconcile()
            for replica in replicas:
                self.reconciler.beat(replica, LOAD)

    def serving(self, release: str = "blue", fingerprint: str = "f") -> Replica:
        """A ready replica."""
        replica = ready(self.reconciler.join("coder", release, "127.0.0.1"), 81, 80, fingerprint)
        self.reconciler.beat(replica, LOAD)
        return replica

    @property
    def pool(self) -> list[str]:
        """The replicas that get calls, as written last."""
        return [replica.id for replica in self.written[-1].release("coder", "blue").pool]


def test_a_replica_gets_calls_from_ready_until_drain() -> None:
    kept = Reconciled()
    starting = kept.reconciler.join("coder", "blue", "127.0.0.1")
    name = starting.id
    assert not kept.reconciler.beat(starting, None).drain
    assert kept.pool == []
    serving = ready(starting, 81, 80, "f")
    kept.reconciler.beat(serving, LOAD)
    assert kept.pool == [name]
    (shown,) = kept.reconciler.status()["coder"]["blue"]["replicas"]
    assert (shown["state"], shown["http_port"], shown["waiting"], shown["busy"]) == ("ready", 81, 1, 0.25)
    kept.reconciler.apply(draining, name)
    assert kept.pool == []
    assert kept.reconciler.beat(serving, LOAD).drain
    assert kept.pool == []
    kept.reconciler.leave(serving)
    assert kept.reconciler.fleet.replicas == ()


def test_a_heartbeat_without_a_change_is_not_written() -> None:
    kept = Reconciled()
    serving = kept.serving()
    written = len(kept.written)
    kept.reconciler.beat(serving, replace(LOAD, waiting=5))
    assert len(kept.written) == written


def test_a_dead_replica_is_replaced_and_a_draining_one_is_not() -> None:
    kept = Reconciled()
    first, second = kept.serving(), kept.serving()
    assert (first.id, second.id) == ("coder.blue.0", "coder.blue.1")
    kept.reconciler.leave(first)
    assert kept.serving().id == first.id
    kept.reconciler.apply(draining, second.id)
    assert kept.serving().id == "coder.blue.2"


def test_replicas_with_another_fingerprint_do_not_enter_a_pool() -> None:
    kept = Reconciled()
    kept.serving()
    other = ready(kept.reconciler.join("coder", "blue", "::1"), 81, 80, "other")
    misfit = kept.reconciler.beat(other, LOAD).misfit
    assert "other" in misfit
    assert "f" in misfit
    assert kept.pool == ["coder.blue.0"]
    assert kept.reconciler.status()["coder"]["blue"]["replicas"][1]["state"] == "refused"
    assert kept.serving("green", "other").id == "coder.green.0"


def test_a_silent_replica_is_dropped_and_returns_with_its_next_heartbeat() -> None:
    kept = Reconciled()
    silent, lively = kept.serving(), kept.serving()
    kept.pass_time(SILENT_PERIODS, lively)
    assert kept.pool == [silent.id, lively.id]
    kept.pass_time(1.0, lively)
    assert kept.pool == [lively.id]
    kept.reconciler.beat(silent, LOAD)
    assert kept.pool == [silent.id, lively.id]


def test_a_replica_whose_id_has_a_new_owner_does_not_affect_it() -> None:
    kept = Reconciled()
    former = kept.serving()
    kept.pass_time(SILENT_PERIODS + 1)
    successor = ready(kept.reconciler.join("coder", "blue", "127.0.0.1"), 91, 90, "f")
    kept.reconciler.beat(successor, LOAD)
    assert successor.id == former.id
    assert kept.reconciler.beat(former, LOAD).drain
    kept.reconciler.beat(replace(former, state=ReplicaState.DRAINING), LOAD)
    kept.reconciler.leave(former)
    assert kept.reconciler.fleet.replicas == (successor,)
    assert kept.pool == [successor.id]
    kept.pass_time(SILENT_PERIODS + 2, former)
    assert [replica.owner for replica in kept.reconciler.fleet.replicas] == [former.owner]


def test_a_dropped_replica_can_stop() -> None:
    kept = Reconciled()
    replica = kept.serving()
    kept.pass_time(SILENT_PERIODS + 1)
    kept.reconciler.beat(replace(replica, state=ReplicaState.DRAINING), LOAD)
    kept.reconciler.leave(replica)
    assert kept.reconciler.fleet.replicas == ()


def test_a_slow_disk_drops_no_replica() -> None:
    kept = Reconciled()
    replicas = [kept.serving() for _ in range(SILENT_PERIODS + 2)]
    kept.now_s, kept.write_s = 1.0, 4.0
    for replica in replicas * 3:  # queued heartbeats
        kept.reconciler.reconcile()
        kept.reconciler.beat(replica, LOAD)
    assert len(kept.pool) == len(replicas)


def test_a_restarted_reconciler_continues_with_the_fleet_and_drops_silent_replicas() -> None:
    former = Reconciled()
    lively, silent = former.serving(), former.serving()
    kept = Reconciled(former.reconciler.fleet)
    assert kept.pool == [lively.id, silent.id]
    kept.pass_time(SILENT_PERIODS + 1, lively)
    assert kept.pool == [lively.id]


def test_a_stall_of_the_reconciler_drops_no_replica() -> None:
    kept = Reconciled()
    first, second = kept.serving(), kept.serving()
    for _ in range(2):
        kept.pass_time(3.0, first, second)
        kept.now_s += 30.0
        kept.reconciler.reconcile()  # the first call after the stall, before the queued heartbeats
        assert kept.pool == [first.id, second.id]
    kept.pass_time(SILENT_PERIODS + 2, second)
    assert kept.pool == [second.id]


@pytest.mark.parametrize(
    ("transition", "arguments"),
    [
        (switched, ("coder", "green")),
        (rolled_back, ("coder",)),
        (with_weights, ("coder", {"blue": 50, "green": 50})),
        (draining, ("coder.blue.0",)),
    ],
)
def test_a_command_that_cannot_be_written_changes_nothing(
    transition: Callable[..., Fleet], arguments: tuple[Any, ...]
) -> None:
    kept = Reconciled()
    kept.serving()
    kept.serving("green", "other")
    kept.reconciler.apply(with_weights, "coder", {"blue": 90, "green": 10})
    before = kept.reconciler.fleet
    kept.disk_is_full = True
    for _ in range(2):
        with pytest.raises(FleetWriteError, match=r"cannot be written: .*No space left on device.*; nothing changed"):
            kept.reconciler.apply(transition, *arguments)
        assert kept.reconciler.fleet == before == kept.written[-1]
    kept.disk_is_full = False
    kept.reconciler.apply(transition, *arguments)
    assert kept.written[-1] == kept.reconciler.fleet == transition(before, *arguments)


def test_reports_during_a_full_disk_are_written_within_a_period_after() -> None:
    kept = Reconciled()
    ends, stays = kept.serving(), kept.serving()
    kept.disk_is_full = True
    kept.reconciler.leave(ends)
    joined = kept.serving()
    assert joined.id == ends.id
    kept.reconciler.beat(replace(stays, state=ReplicaState.DRAINING), LOAD)
    kept.pass_time(SILENT_PERIODS + 2, joined)
    assert kept.reconciler.write_error
    kept.disk_is_full = False
    kept.pass_time(1.0, joined)
    assert kept.written[-1] == kept.reconciler.fleet
    assert kept.pool == [joined.id]
    assert not kept.reconciler.write_error


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


def test_bug_a_machine_without_an_address_is_refused_and_disturbs_no_other() -> None:
    """Its replica joined and became ready, and then nothing could be written until it had been silent for long."""
    kept = Reconciled()
    serving = kept.serving()
    with pytest.raises(ConfigError, match=r"'node-7' is not an IP address; start Ray .*--node-ip-address"):
        kept.reconciler.join("coder", "blue", "node-7")
    kept.pass_time(2.0, serving)
    assert [replica.id for replica in kept.reconciler.fleet.replicas] == kept.pool == [serving.id]


def test_an_ended_release_is_removed() -> None:
    kept = Reconciled()
    kept.reconciler.apply(with_release, "coder", "red")
    assert [*kept.reconciler.status()["coder"]] == ["blue", "green", "red"]
    with pytest.raises(ConfigError, match="weight 0 first"):
        kept.reconciler.apply(without_release, "coder", "blue")
    kept.reconciler.apply(without_release, "coder", "red")
    assert [*kept.reconciler.status()["coder"]] == ["blue", "green"]


def test_a_deployment_has_another_version_if_its_replicas_would_differ() -> None:
    blue, green = (deployment_of(CONFIG, "coder", name) for name in ("blue", "green"))
    assert green.settings == {"engine": {"target": "some", "dtype": "bf16"}, "server": {"log_calls": False}}
    assert blue.version != green.version
    assert blue.scaled(3, 7).version == blue.version
    cores = blue.model_copy(update={"replicas": blue.replicas.model_copy(update={"cpus": 1.0})})
    assert cores.version != blue.version  # Ray reserves one core in both cases, but the number of threads differs
    assert blue.restarted().version != blue.version
    assert (blue.scaled(3, 5).replicas.min, blue.scaled(3, 5).replicas.max) == (3, 5)
    for low, high in ((0, 1), (3, 2)):
        with pytest.raises(ConfigError, match="replicas"):
            blue.scaled(low, high)
