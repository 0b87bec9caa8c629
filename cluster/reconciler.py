"""The reconciler: keeps the state of the fleet from heartbeats and operators' commands, and writes it for Envoy.

A command is written before it takes effect, so one that fails changes nothing. What a replica reports is a fact: it
takes effect at once, and `Reconciler.reconcile` repeats a failed write every period.

Plain code for one event loop; `cluster.ray_serve` makes it an actor.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.autoscale import ReplicaLoad
from cluster.config import ClusterConfig, fixed_changes
from cluster.deployment import Deployment
from cluster.fleet import Fleet, Replica, ReplicaState, with_release, with_replica, without_release, without_replica
from cluster.state_folder import FleetState
from specdec.errors import ConfigError, SpecdecError

_LOG = logging.getLogger(__name__)
BEAT_S = 1.0  # between two heartbeats of a replica, and the period of `Reconciler.reconcile`
# A replica without a heartbeat in so many periods is dropped. Envoy notices a dead replica at once; dropping it frees
# its id, which an overloaded machine must not lose within seconds.
SILENT_PERIODS = 15


class FleetWriteError(SpecdecError):
    """The state of the fleet cannot be written; nothing changed."""


@dataclass(frozen=True, slots=True)
class Order:
    """The answer to a heartbeat."""

    drain: bool = False  # finish the running calls, then stop: an operator asked for it, or the id has a new owner
    misfit: str = ""  # why the replica gets no calls; empty: it may get some


@dataclass(slots=True)
class _Beat:
    load: ReplicaLoad | None = None
    periods: int = 0  # of the reconciler, since this heartbeat


class Reconciler:
    """Applies changes to the fleet, its configuration and its deployments.

    ``write``: publishes and saves a state, all of it or nothing; raises OSError. Where it does so for an operator's
    command, the command raises FleetWriteError and changes nothing. ``clock``: monotonic seconds.
    """

    def __init__(
        self, state: FleetState, write: Callable[[FleetState], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state, self._write, self._clock = state, write, clock
        self._beats = {replica.id: _Beat() for replica in state.fleet.replicas}
        self._reconciled_s = clock()
        self.write_error = ""  # of the last write; empty: it succeeded
        self._publish(state)

    @property
    def fleet(self) -> Fleet:
        """The replicas and releases."""
        return self.state.fleet

    def join(self, model: str, release: str, host: str) -> Replica:
        """Adds a starting replica and returns it. It gets the lowest free id, so a replacement takes over the id of the
        replica that died, and with it the place in the hash ring.

        Raises:
            ConfigError: there is no such model or release, or ``host`` is not an IP address, which Envoy needs.
        """
        self.fleet.release(model, release)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(
                f"{host!r} is not an IP address; start Ray on that machine with --node-ip-address ADDRESS"
            ) from None
        taken = {replica.id for replica in self.fleet.replicas}
        ids = (f"{model}.{release}.{number}" for number in range(len(taken) + 1))
        replica_id = next(each for each in ids if each not in taken)
        replica = Replica(replica_id, model, release, host, 0, 0, owner=secrets.token_hex(8))
        self._beats[replica.id] = _Beat()
        self._observe(with_replica(self.fleet, replica))
        return replica

    def beat(self, replica: Replica, load: ReplicaLoad | None) -> Order:
        """Takes a replica's heartbeat. A replica that is unknown, because the reconciler restarted or dropped it, joins
        again, unless its id has a new owner.

        Raises:
            ConfigError: there is no such model or release.
        """
        if self._has_new_owner(replica):
            return Order(drain=True)
        self._beats[replica.id] = _Beat(load)
        known = self.fleet.replica(replica.id)
        if known is not None and known.state is ReplicaState.DRAINING:
            return Order(drain=True)
        if known != replica:
            self._observe(with_replica(self.fleet, replica))
        release = self.fleet.release(replica.model, replica.release)
        if replica in release.misfits:
            return Order(misfit=f"its numeric fingerprint is {replica.fingerprint}, its pool's {release.fingerprint}")
        return Order()

    def leave(self, replica: Replica) -> None:
        """The replica stopped."""
        if not self._has_new_owner(replica):
            self._drop(replica.id)

    def reconcile(self) -> None:
        """Drops the replicas whose last heartbeat is too old, and writes the fleet again, in case that a file differs
        from it. Has an effect once per period; to be called before each other method.

        Silence counts in periods in which this was called. A time for which the reconciler itself is stopped is one
        period, however long it is: the heartbeats of that time are queued.
        """
        if self._clock() - self._reconciled_s < BEAT_S:
            return
        for replica_id, beat in list(self._beats.items()):
            beat.periods += 1
            if beat.periods > SILENT_PERIODS:
                self._drop(replica_id)
        self._publish(self.state)
        self._reconciled_s = self._clock()  # a slow disk is a stop too

    def apply(self, transition: Callable[..., Fleet], *arguments: Any) -> None:
        """Applies a function of `cluster.fleet` to the fleet: an operator's command.

        Raises:
            ConfigError: the function refuses it.
        """
        self._adopt(fleet=transition(self.fleet, *arguments))

    def configure(self, config: ClusterConfig) -> None:
        """Adopts a changed configuration: routing, and new releases.

        Raises:
            ConfigError: a field changed that a running fleet cannot adopt.
        """
        if fixed := fixed_changes(self.state.config, config):
            raise ConfigError(
                f"{', '.join(fixed)}: cannot change while the fleet runs, since Envoy reads it only at its start; "
                "restore it, or restart the fleet"
            )
        fleet = self.fleet
        for model in config.models:
            for name in model.releases:
                fleet = with_release(fleet, model.name, name)
        self._adopt(config=config, fleet=fleet)

    def deployed(self, deployment: Deployment) -> None:
        """Records a deployment."""
        self._adopt(deployments={**self.state.deployments, deployment.app: deployment})

    def removed(self, deployment: Deployment) -> None:
        """Forgets a deployment and its release.

        Raises:
            ConfigError: as `without_release`.
        """
        left = {app: kept for app, kept in self.state.deployments.items() if app != deployment.app}
        self._adopt(deployments=left, fleet=without_release(self.fleet, deployment.model, deployment.release))

    def status(self) -> dict[str, Any]:
        """The fleet as JSON: by model its releases, with their replicas and the replicas' load."""
        return {
            model: {
                name: {
                    "weight": release.weight,
                    "fingerprint": release.fingerprint,
                    "replicas": [
                        self._replica_status(replica, replica in release.misfits) for replica in release.replicas
                    ],
                }
                for name, release in releases.items()
            }
            for model, releases in self.fleet.releases.items()
        }

    def _replica_status(self, replica: Replica, refused: bool) -> dict[str, Any]:
        load = self._beats[replica.id].load
        return {
            "id": replica.id,
            "state": "refused" if refused else replica.state.value,
            "host": replica.host,
            "http_port": replica.http_port,
            "grpc_port": replica.grpc_port,
            "fingerprint": replica.fingerprint,
            **{name: getattr(load, name, None) for name in ("waiting", "wait_s", "busy")},
        }

    def _has_new_owner(self, replica: Replica) -> bool:
        """Whether another replica took over the id after this one was dropped."""
        known = self.fleet.replica(replica.id)
        return known is not None and known.owner != replica.owner

    def _drop(self, replica_id: str) -> None:
        self._beats.pop(replica_id, None)
        self._observe(without_replica(self.fleet, replica_id))

    def _observe(self, fleet: Fleet) -> None:
        """Adopts a fact that a replica reports."""
        if fleet != self.fleet:
            self.state = self.state.model_copy(update={"fleet": fleet})
            self._publish(self.state)

    def _adopt(self, **changes: Any) -> None:
        """Adopts fields of the state that an operator changes, all of them or none."""
        state = self.state.model_copy(update=changes)
        if not self._publish(state):
            raise FleetWriteError(f"{self.write_error}; nothing changed")
        self.state = state

    def _publish(self, state: FleetState) -> bool:
        """Writes ``state``. False: it cannot be written, and ``write_error`` says why."""
        try:
            self._write(state)
        except OSError as error:
            self.write_error = f"the fleet's files cannot be written: {error}"
            _LOG.error("%s", self.write_error)
        else:
            self.write_error = ""
        return not self.write_error


def ready(replica: Replica, http_port: int, grpc_port: int, fingerprint: str) -> Replica:
    """``replica`` once its server takes requests."""
    return replace(replica, http_port=http_port, grpc_port=grpc_port, fingerprint=fingerprint, state=ReplicaState.READY)
