"""The reconciler: keeps the state of the fleet from heartbeats and operators' commands, and writes it for Envoy.

A command is written before it takes effect, so one that fails changes nothing. What a replica reports is a fact: it
takes effect at once, and `Reconciler.reconcile` repeats a failed write every period.

Plain code for one event loop; `cluster.ray_serve` makes it an actor.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.autoscale import ReplicaLoad
from cluster.fleet import Fleet, Replica, ReplicaState, with_replica, without_replica
from specdec.errors import SpecdecError

_LOG = logging.getLogger(__name__)
BEAT_S = 1.0  # between two heartbeats of a replica, and the period of `Reconciler.reconcile`
# A replica without a heartbeat for so long is dropped. Envoy notices a dead replica at once; dropping it frees its id,
# which an overloaded machine must not lose within seconds.
SILENT_S = 15.0
STALL_S = 5.0  # without a call: the reconciler itself was stopped, and heartbeats are queued


class FleetWriteError(SpecdecError):
    """The state of the fleet cannot be written; nothing changed."""


@dataclass(frozen=True, slots=True)
class Order:
    """The answer to a heartbeat."""

    drain: bool = False  # finish the running calls, then stop: an operator asked for it, or the id has a new owner
    misfit: str = ""  # why the replica gets no calls; empty: it may get some


@dataclass(slots=True)
class _Beat:
    at_s: float
    load: ReplicaLoad | None = None


class Reconciler:
    """Applies changes to the fleet.

    ``write``: publishes a fleet to Envoy, all of it or nothing; raises OSError. ``clock``: monotonic seconds.
    """

    def __init__(
        self, fleet: Fleet, write: Callable[[Fleet], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fleet, self._write, self._clock = fleet, write, clock
        self._beats = {replica.id: _Beat(clock()) for replica in fleet.replicas}
        self._reconciled_s = clock()
        self.write_error = ""  # of the last write; empty: it succeeded
        self._publish(self.fleet)

    def join(self, model: str, release: str, host: str) -> Replica:
        """Adds a starting replica and returns it. It gets the lowest free id, so a replacement takes over the id of the
        replica that died, and with it the place in the hash ring.

        Raises:
            ConfigError: there is no such model or release.
        """
        self.fleet.release(model, release)
        taken = {replica.id for replica in self.fleet.replicas}
        ids = (f"{model}.{release}.{number}" for number in range(len(taken) + 1))
        replica_id = next(each for each in ids if each not in taken)
        replica = Replica(replica_id, model, release, host, 0, 0, owner=secrets.token_hex(8))
        self._beats[replica.id] = _Beat(self._clock())
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
        self._beats[replica.id] = _Beat(self._clock(), load)
        known = self.fleet.replica(replica.id)
        if known is not None and known.state is ReplicaState.DRAINING:
            return Order(drain=True)
        if known != replica:
            self._observe(with_replica(self.fleet, replica))
        pool = self.fleet.release(replica.model, replica.release).fingerprint
        if replica in self.fleet.misfits:
            return Order(misfit=f"its numeric fingerprint is {replica.fingerprint}, its pool's {pool}")
        return Order()

    def leave(self, replica: Replica) -> None:
        """The replica stopped."""
        if not self._has_new_owner(replica):
            self._drop(replica.id)

    def reconcile(self) -> None:
        """Drops the replicas whose last heartbeat is too old, and writes the fleet again, in case that a file differs
        from it. Has an effect once per period; to be called before each other method.

        Replicas call at least once per period. After a longer gap the reconciler itself was stopped, so the gap does
        not count as the replicas' silence: their heartbeats are queued.
        """
        now_s = self._clock()
        gap_s = now_s - self._reconciled_s
        if gap_s < BEAT_S:
            return
        self._reconciled_s = now_s
        if gap_s > STALL_S:
            _LOG.warning("the reconciler was stopped for %.1f s", gap_s)
            for beat in self._beats.values():
                beat.at_s = min(now_s, beat.at_s + gap_s)
        late_s = now_s - SILENT_S
        for replica_id in [replica_id for replica_id, beat in self._beats.items() if beat.at_s < late_s]:
            self._drop(replica_id)
        self._publish(self.fleet)

    def apply(self, transition: Callable[..., Fleet], *arguments: Any) -> None:
        """Applies a function of `cluster.fleet` to the fleet: an operator's command.

        Raises:
            ConfigError: the function refuses it.
            FleetWriteError: the disk is full, say; the fleet stays as it was.
        """
        fleet = transition(self.fleet, *arguments)
        if not self._publish(fleet):
            raise FleetWriteError(f"{self.write_error}; nothing changed")
        self.fleet = fleet

    def status(self) -> dict[str, Any]:
        """The fleet as JSON: by model its releases, with their replicas and the replicas' load."""
        return {
            model: {
                release.name: {
                    "weight": release.weight,
                    "fingerprint": release.fingerprint,
                    "replicas": [
                        self._replica_status(replica)
                        for replica in self.fleet.replicas
                        if (replica.model, replica.release) == (model, release.name)
                    ],
                }
                for release in releases
            }
            for model, releases in self.fleet.releases.items()
        }

    def _replica_status(self, replica: Replica) -> dict[str, Any]:
        load = self._beats[replica.id].load
        return {
            "id": replica.id,
            "state": "refused" if replica in self.fleet.misfits else replica.state.value,
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
            self.fleet = fleet
            self._publish(self.fleet)

    def _publish(self, fleet: Fleet) -> bool:
        """Writes ``fleet``. False: it cannot be written, and ``write_error`` says why."""
        try:
            self._write(fleet)
        except OSError as error:
            self.write_error = f"the fleet's files cannot be written: {error}"
            _LOG.error("%s", self.write_error)
        else:
            self.write_error = ""
        return not self.write_error


def ready(replica: Replica, http_port: int, grpc_port: int, fingerprint: str) -> Replica:
    """``replica`` once its server takes requests."""
    return replace(replica, http_port=http_port, grpc_port=grpc_port, fingerprint=fingerprint, state=ReplicaState.READY)
