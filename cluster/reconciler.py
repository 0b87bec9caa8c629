"""Keeps the fleet: replicas tell it of themselves, operators of releases, and whoever routes calls is told what
changed.

Plain asyncio, from one event loop; `cluster.ray_serve` makes an actor of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.autoscale import ReplicaLoad
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

# A replica that has said nothing for so many intervals, and so many seconds, is gone. Envoy notices a dead one at once;
# this frees its place only, which a machine that is overloaded for some seconds must not lose it.
SILENT_BEATS, SILENT_S = 4.0, 15.0


@dataclass(frozen=True, slots=True)
class Order:
    """The answer to a replica's beat. ``drain``: finish the calls that run, then end, since an operator wants it or
    another has its id by now. ``misfit``: why it gets no calls; empty where it may."""

    drain: bool = False
    misfit: str = ""


@dataclass(slots=True)
class _Beat:
    at_s: float
    load: ReplicaLoad | None = None


class Reconciler:
    """``write`` gets the fleet after every change and puts it where calls are routed by it. ``interval_s``: between two
    beats of a replica. ``clock``: monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        write: Callable[[Fleet], None],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._write, self._clock = fleet, write, clock
        self._interval_s = interval_s
        self._beats = {replica.id: _Beat(clock()) for replica in fleet.replicas}
        write(fleet)

    @property
    def fleet(self) -> Fleet:
        """As it is now."""
        return self._fleet

    def join(self, model: str, release: str, host: str) -> Replica:
        """A replica starts; returns it, under the first id that is free: who takes the place of a replica that died has
        its id, and with it its place in the hash ring.

        Raises:
            ConfigError: there is no such model or release.
        """
        self._fleet.release(model, release)
        taken = {replica.id for replica in self._fleet.replicas}
        number = next(n for n in range(len(taken) + 1) if _id(model, release, n) not in taken)
        replica = Replica(_id(model, release, number), model, release, host, 0, 0, owner=secrets.token_hex(8))
        self._beats[replica.id] = _Beat(self._clock())
        self._change(with_replica(self._fleet, replica))
        return replica

    def beat(self, replica: Replica, load: ReplicaLoad | None) -> Order:
        """A replica tells how it is. One that the keeper does not know any more, having begun anew or taken it for
        dead, is let in again, unless its id is another's by now.

        Raises:
            ConfigError: there is no such model or release.
        """
        if self._is_taken(replica):
            return Order(drain=True)
        self._beats[replica.id] = _Beat(self._clock(), load)
        known = self._known(replica.id)
        if known is not None and known.state is ReplicaState.DRAINING:
            return Order(drain=True)
        if known != replica:
            self._change(with_replica(self._fleet, replica))
        pool = self._fleet.release(replica.model, replica.release).fingerprint
        if replica in self._fleet.misfits:
            return Order(misfit=f"its numeric fingerprint is {replica.fingerprint}, its pool's {pool}")
        return Order()

    def drain(self, replica_id: str) -> None:
        """An operator wants it to get no more calls.

        Raises:
            ConfigError: there is no such replica.
        """
        if self._known(replica_id) is None:
            known = ", ".join(replica.id for replica in self._fleet.replicas) or "none"
            raise ConfigError(f"no replica {replica_id!r}; there are: {known}")
        self._change(draining(self._fleet, replica_id))

    def retire(self, replica: Replica) -> None:
        """It says itself that it takes no more calls."""
        if not self._is_taken(replica):
            self._change(draining(self._fleet, replica.id))

    def leave(self, replica: Replica) -> None:
        """It ended."""
        if not self._is_taken(replica):
            self._forget(replica.id)

    def drop_silent(self) -> list[str]:
        """Forget the replicas that have not told anything for too long; returns their ids."""
        late_s = self._clock() - max(SILENT_BEATS * self._interval_s, SILENT_S)
        silent = [replica_id for replica_id, beat in self._beats.items() if beat.at_s < late_s]
        for replica_id in silent:
            self._forget(replica_id)
        return silent

    def allow_interval(self, interval_s: float) -> None:
        """Replicas may say something every ``interval_s`` from now on, or as before: all are replaced one by one."""
        self._interval_s = max(self._interval_s, interval_s)

    def open_release(self, model: str, release: str) -> None:
        """``model`` has a further release, of no weight yet."""
        self._change(with_release(self._fleet, model, release))

    def close_release(self, model: str, release: str) -> None:
        """The release is over.

        Raises:
            ConfigError: it has sessions or replicas still.
        """
        self._change(without_release(self._fleet, model, release))

    def weigh(self, model: str, weights: Mapping[str, int]) -> None:
        """The shares of releases, as `with_weights`.

        Raises:
            ConfigError: they can not be given.
        """
        self._change(with_weights(self._fleet, model, weights))

    def promote(self, model: str, release: str) -> None:
        """All sessions go to ``release``.

        Raises:
            ConfigError: it has no replica that is ready.
        """
        self._change(switched(self._fleet, model, release))

    def roll_back(self, model: str) -> None:
        """The shares are again as they were before they changed last.

        Raises:
            ConfigError: they have not changed.
        """
        self._change(rolled_back(self._fleet, model))

    def status(self) -> dict[str, Any]:
        """Everything, to show: by model its releases, and in these their replicas with their load."""
        return {
            model: {
                release.name: {
                    "weight": release.weight,
                    "fingerprint": release.fingerprint,
                    "replicas": [
                        self._told(replica)
                        for replica in self._fleet.replicas
                        if (replica.model, replica.release) == (model, release.name)
                    ],
                }
                for release in releases
            }
            for model, releases in self._fleet.releases.items()
        }

    def _told(self, replica: Replica) -> dict[str, Any]:
        beat = self._beats.get(replica.id)
        load = None if beat is None else beat.load
        return {
            "id": replica.id,
            "state": "refused" if replica in self._fleet.misfits else replica.state.value,
            "host": replica.host,
            "http_port": replica.http_port,
            "grpc_port": replica.grpc_port,
            "fingerprint": replica.fingerprint,
            "waiting": None if load is None else load.waiting,
            "wait_s": None if load is None else load.wait_s,
            "busy": None if load is None else load.busy,
        }

    def _is_taken(self, replica: Replica) -> bool:
        """Whether its id is another's by now: it was taken for dead, and its place was given away."""
        known = self._known(replica.id)
        return known is not None and known.owner != replica.owner

    def _forget(self, replica_id: str) -> None:
        self._beats.pop(replica_id, None)
        self._change(without_replica(self._fleet, replica_id))

    def _known(self, replica_id: str) -> Replica | None:
        return next((replica for replica in self._fleet.replicas if replica.id == replica_id), None)

    def _change(self, fleet: Fleet) -> None:
        if fleet != self._fleet:
            self._fleet = fleet
            self._write(fleet)


def ready(replica: Replica, http_port: int, grpc_port: int, fingerprint: str) -> Replica:
    """``replica`` once its server takes requests."""
    return replace(replica, http_port=http_port, grpc_port=grpc_port, fingerprint=fingerprint, state=ReplicaState.READY)


def _id(model: str, release: str, number: int) -> str:
    return f"{model}.{release}.{number}"
