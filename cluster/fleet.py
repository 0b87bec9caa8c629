"""The replicas that there are, and which calls each may get: frozen data, and functions from one fleet to the next.

Sessions are split between a model's releases by hash. A release's replicas form one pool, and all of a pool have the
same numeric fingerprint: what computes a token beside the request. So within a pool a call that is tried again, or a
stream that goes on elsewhere, has the same bits; what changes the numbers is a release of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.config import ClusterConfig
from specdec.errors import ConfigError


class ReplicaState(StrEnum):
    """``DRAINING``: it finishes what it has and gets nothing more."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Replica:
    """One server. ``id`` stays the same for as long as it runs, and is its place in the hash ring: who takes its place
    should have the same. ``owner``: tells it from any other of its id, before and after. ``fingerprint``: empty as long
    as it is not ready."""

    id: str
    model: str
    release: str
    host: str
    http_port: int
    grpc_port: int
    fingerprint: str = ""
    state: ReplicaState = ReplicaState.STARTING
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """``weight``: its share of the sessions, against those of the model's other releases. ``fingerprint``: of the first
    of its replicas that was ready; empty: none was yet. Another one's replicas are not let into its pool."""

    name: str
    weight: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """``releases`` by model, oldest first. ``earlier`` has the weights by model and release before the last change of
    them, to which `rolled_back` returns."""

    replicas: tuple[Replica, ...]
    releases: Mapping[str, tuple[Release, ...]]
    earlier: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, config: ClusterConfig) -> Fleet:
        """The releases of ``config``, without replicas."""
        releases = {
            model.name: tuple(Release(name, release.weight) for name, release in model.releases.items())
            for model in config.models
        }
        return cls((), releases, {})

    def release(self, model: str, name: str) -> Release:
        """A release by its name.

        Raises:
            ConfigError: there is no such model or release.
        """
        for release in self._releases_of(model):
            if release.name == name:
                return release
        known = ", ".join(release.name for release in self._releases_of(model))
        raise ConfigError(f"{model} has no release {name!r}; there are: {known}")

    def pool(self, model: str, release: str) -> tuple[Replica, ...]:
        """The replicas that may get calls of ``release``: ready, and of its fingerprint."""
        fingerprint = self.release(model, release).fingerprint
        return tuple(
            replica
            for replica in self.replicas
            if (replica.model, replica.release, replica.fingerprint) == (model, release, fingerprint)
            and replica.state is ReplicaState.READY
        )

    @property
    def misfits(self) -> tuple[Replica, ...]:
        """Replicas that are ready and yet get no call, because their fingerprint is not their release's."""
        return tuple(
            replica
            for replica in self.replicas
            if replica.state is ReplicaState.READY
            and replica.fingerprint != self.release(replica.model, replica.release).fingerprint
        )

    def live(self, model: str) -> Release:
        """The release that calls without a session get: of those that have replicas the heaviest, the older of two
        equal ones; where none has replicas, the heaviest of all."""
        releases = self._releases_of(model)
        able = [release for release in releases if release.weight and self.pool(model, release.name)]
        return max(able or releases, key=lambda release: release.weight)

    def live_fingerprint(self, model: str) -> str:
        """The fingerprint of the live release; empty: none of its replicas was ready yet."""
        return self.live(model).fingerprint

    def shares(self, model: str) -> list[tuple[str, int]]:
        """Releases and their weights, the newest first, so that whoever is in a canary stays in it as it grows. The
        share of a release without a replica that could serve it goes to the live one, in its place."""
        live = self.live(model)
        return [
            (release.name if self.pool(model, release.name) else live.name, release.weight)
            for release in reversed(self._releases_of(model))
            if release.weight
        ]

    def _releases_of(self, model: str) -> tuple[Release, ...]:
        if model not in self.releases:
            raise ConfigError(f"no model {model!r} in the fleet; there are: {', '.join(self.releases)}")
        return self.releases[model]


def with_replica(fleet: Fleet, replica: Replica) -> Fleet:
    """``replica`` is new, or has changed. The first of a release that is ready gives it its fingerprint.

    Raises:
        ConfigError: there is no such model or release; it is ready and has no fingerprint; or one of that id is of
            another release.
    """
    release = fleet.release(replica.model, replica.release)
    former = next((known for known in fleet.replicas if known.id == replica.id), None)
    if former is not None and (former.model, former.release) != (replica.model, replica.release):
        raise ConfigError(f"replica {replica.id} is of {former.model}/{former.release}; an id is of one release")
    if replica.state is ReplicaState.READY:
        if not replica.fingerprint:
            raise ConfigError(f"replica {replica.id} is ready and has no fingerprint: nobody could stand in for it")
        if not release.fingerprint:
            fleet = _with_release(fleet, replica.model, replace(release, fingerprint=replica.fingerprint))
    others = tuple(known for known in fleet.replicas if known.id != replica.id)
    replicas = sorted((*others, replica), key=lambda known: known.id)
    return replace(fleet, replicas=tuple(replicas))


def without_replica(fleet: Fleet, replica_id: str) -> Fleet:
    """It is gone. When it was the last one of its release's fingerprint, that becomes another's that waits, if any."""
    gone = next((replica for replica in fleet.replicas if replica.id == replica_id), None)
    if gone is None:
        return fleet
    fleet = replace(fleet, replicas=tuple(replica for replica in fleet.replicas if replica.id != replica_id))
    release = fleet.release(gone.model, gone.release)
    left = [r for r in fleet.replicas if (r.model, r.release) == (gone.model, gone.release) and r.fingerprint]
    if any(replica.fingerprint == release.fingerprint for replica in left):
        return fleet
    waiting = [replica.fingerprint for replica in left if replica.state is ReplicaState.READY]
    return _with_release(fleet, gone.model, replace(release, fingerprint=waiting[0] if waiting else ""))


def draining(fleet: Fleet, replica_id: str) -> Fleet:
    """It gets no more calls, and finishes those it has."""
    return replace(
        fleet,
        replicas=tuple(
            replace(replica, state=ReplicaState.DRAINING) if replica.id == replica_id else replica
            for replica in fleet.replicas
        ),
    )


def with_release(fleet: Fleet, model: str, name: str) -> Fleet:
    """``model`` has a further release, of no weight yet, the newest of all; one that is there already stays."""
    releases = fleet.releases.get(model, ())
    if any(release.name == name for release in releases):
        return fleet
    return replace(fleet, releases={**fleet.releases, model: (*releases, Release(name, 0))})


def without_release(fleet: Fleet, model: str, name: str) -> Fleet:
    """The release is over.

    Raises:
        ConfigError: it has replicas or sessions still.
    """
    release = fleet.release(model, name)
    if release.weight:
        raise ConfigError(f"{model}/{name} has {release.weight} of the sessions; give it the weight 0 first")
    if any((replica.model, replica.release) == (model, name) for replica in fleet.replicas):
        raise ConfigError(f"{model}/{name} has replicas; drain them first")
    left = tuple(kept for kept in fleet.releases[model] if kept.name != name)
    earlier = {which: weights for which, weights in fleet.earlier.items() if which != model or name not in weights}
    return replace(fleet, releases={**fleet.releases, model: left}, earlier=earlier)


def with_weights(fleet: Fleet, model: str, weights: Mapping[str, int]) -> Fleet:
    """A canary: ``weights`` by release; those not named keep theirs.

    Raises:
        ConfigError: a release is unknown, none is left with a weight, or one is to get sessions and has no replica to
            serve them.
    """
    for name, weight in weights.items():
        release = fleet.release(model, name)
        if weight < 0:
            raise ConfigError(f"{model}/{name}: a weight of {weight}; it must be 0 or more")
        if weight > release.weight and not fleet.pool(model, name):
            raise ConfigError(f"{model}/{name} has no replica that is ready; start some before it gets sessions")
    former = {release.name: release.weight for release in fleet.releases[model]}
    return _reweighed(fleet, model, {**former, **weights})


def switched(fleet: Fleet, model: str, name: str) -> Fleet:
    """Blue-green: ``name`` gets all sessions at once; the others keep their replicas, for `rolled_back`.

    Raises:
        ConfigError: as `with_weights`.
    """
    others = {release.name: 0 for release in fleet.releases.get(model, ())}
    return with_weights(fleet, model, {**others, name: 100})


def rolled_back(fleet: Fleet, model: str) -> Fleet:
    """The weights are again what they were before they were changed last; once more, and they are as now.

    Raises:
        ConfigError: they never changed, or who had sessions then has no replica any more.
    """
    if model not in fleet.earlier:
        raise ConfigError(f"{model}: the weights have not been changed, so there is nothing to go back to")
    return with_weights(fleet, model, fleet.earlier[model])


def _reweighed(fleet: Fleet, model: str, weights: Mapping[str, int]) -> Fleet:
    if not any(weights.values()):
        raise ConfigError(f"{model}: every release would have the weight 0, and nobody be served")
    former = {release.name: release.weight for release in fleet.releases[model]}
    if former == dict(weights):
        return fleet
    changed = tuple(replace(release, weight=weights[release.name]) for release in fleet.releases[model])
    return replace(
        fleet, releases={**fleet.releases, model: changed}, earlier={**fleet.earlier, model: former}
    )  # fmt: skip


def _with_release(fleet: Fleet, model: str, release: Release) -> Fleet:
    releases: Sequence[Release] = fleet.releases[model]
    changed = tuple(release if known.name == release.name else known for known in releases)
    return replace(fleet, releases={**fleet.releases, model: changed})
