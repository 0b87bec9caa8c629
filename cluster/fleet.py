"""The state of a fleet: replicas, releases and weights. Frozen data, and functions that return a new fleet.

Sessions are split between the releases of a model by hash. The replicas of a release form one pool and share a numeric
fingerprint, so a call that is retried or resumed on another replica of the pool computes the same bits. A change of the
numbers needs a release of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.config import ClusterConfig
from specdec.errors import ConfigError


class ReplicaState(StrEnum):
    """``DRAINING``: finishes its running calls and gets no new ones."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Replica:
    """One server."""

    id: str
    """The release and a number: unique in the fleet, and the replica's place in the hash ring. A replacement takes the
    id over."""
    model: str
    release: str
    host: str
    http_port: int  # 0 until it is ready
    grpc_port: int  # 0 until it is ready
    fingerprint: str = ""  # numeric fingerprint; empty until it is ready
    state: ReplicaState = ReplicaState.STARTING
    owner: str = ""  # random; distinguishes replicas that had the same id in turn


@dataclass(frozen=True, slots=True)
class Release:
    """One release of a model."""

    name: str
    weight: int  # share of the sessions, relative to the model's other releases
    fingerprint: str = ""
    """Numeric fingerprint of the first replica that became ready; replicas with another one get no calls."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas and releases of all models."""

    replicas: tuple[Replica, ...]
    releases: Mapping[str, tuple[Release, ...]]  # by model, oldest first
    earlier: Mapping[str, Mapping[str, int]]  # weights before their last change, by model and release

    @classmethod
    def of(cls, config: ClusterConfig) -> Fleet:
        """The releases of ``config``, without replicas."""
        releases = {
            model.name: tuple(Release(name, release.weight) for name, release in model.releases.items())
            for model in config.models
        }
        return cls((), releases, {})

    def release(self, model: str, name: str) -> Release:
        """Returns a release by its name.

        Raises:
            ConfigError: there is no such model or release.
        """
        for release in self._releases_of(model):
            if release.name == name:
                return release
        known = ", ".join(release.name for release in self._releases_of(model))
        raise ConfigError(f"{model} has no release {name!r}; there are: {known}")

    def replica(self, replica_id: str) -> Replica | None:
        """Returns a replica by its id, or None."""
        return next((replica for replica in self.replicas if replica.id == replica_id), None)

    def pool(self, model: str, release: str) -> tuple[Replica, ...]:
        """The replicas that may get calls of ``release``: ready, with the release's fingerprint."""
        fingerprint = self.release(model, release).fingerprint
        return tuple(
            replica
            for replica in self.replicas
            if (replica.model, replica.release, replica.fingerprint) == (model, release, fingerprint)
            and replica.state is ReplicaState.READY
        )

    @property
    def misfits(self) -> tuple[Replica, ...]:
        """Ready replicas that get no calls because their fingerprint differs from their release's."""
        return tuple(
            replica
            for replica in self.replicas
            if replica.state is ReplicaState.READY
            and replica.fingerprint != self.release(replica.model, replica.release).fingerprint
        )

    def live(self, model: str) -> Release:
        """The release that calls without a session go to: the heaviest that has replicas, else the heaviest. Of two
        equal ones the older."""
        releases = self._releases_of(model)
        able = [release for release in releases if release.weight and self.pool(model, release.name)]
        return max(able or releases, key=lambda release: release.weight)

    def shares(self, model: str) -> list[tuple[str, int]]:
        """Releases and their weights, newest first, so that a growing canary keeps its sessions. The share of a release
        without replicas goes to the live release, at the same place in the list."""
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
    """Adds or updates ``replica``. The first ready replica of a release sets the release's fingerprint.

    Raises:
        ConfigError: there is no such model or release.
    """
    release = fleet.release(replica.model, replica.release)
    if replica.state is ReplicaState.READY and not release.fingerprint:
        fleet = _with_release(fleet, replica.model, replace(release, fingerprint=replica.fingerprint))
    others = tuple(known for known in fleet.replicas if known.id != replica.id)
    replicas = sorted((*others, replica), key=lambda known: known.id)
    return replace(fleet, replicas=tuple(replicas))


def without_replica(fleet: Fleet, replica_id: str) -> Fleet:
    """Removes a replica. If it was the last one with its release's fingerprint, the release takes the fingerprint of
    another ready replica, if there is one."""
    gone = fleet.replica(replica_id)
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
    """The replica finishes its running calls and gets no new ones.

    Raises:
        ConfigError: there is no such replica.
    """
    replica = fleet.replica(replica_id)
    if replica is None:
        known = ", ".join(replica.id for replica in fleet.replicas) or "none"
        raise ConfigError(f"no replica {replica_id!r}; there are: {known}")
    return with_replica(fleet, replace(replica, state=ReplicaState.DRAINING))


def with_release(fleet: Fleet, model: str, name: str) -> Fleet:
    """Adds a release with weight 0, as the newest; an existing one stays as it is."""
    releases = fleet.releases.get(model, ())
    if any(release.name == name for release in releases):
        return fleet
    return replace(fleet, releases={**fleet.releases, model: (*releases, Release(name, 0))})


def without_release(fleet: Fleet, model: str, name: str) -> Fleet:
    """Removes a release.

    Raises:
        ConfigError: it still has replicas or sessions.
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
    """Changes ``weights``, by release; releases that are not named keep theirs.

    Raises:
        ConfigError: a release is unknown, no release would have a weight, or the share of a named release without a
            ready replica would grow.
    """
    former = {release.name: release.weight for release in fleet.releases.get(model, ())}
    wanted = {**former, **weights}
    before, after = sum(former.values()) or 1, sum(wanted.values()) or 1
    for name, weight in weights.items():
        fleet.release(model, name)
        gain = weight / after - former[name] / before
        if (gain > _ROUNDING or (weight and not former[name])) and not fleet.pool(model, name):
            raise ConfigError(f"{model}/{name} has no replica that is ready; start some before it gets sessions")
    if not any(wanted.values()):
        raise ConfigError(f"{model}: every release would have the weight 0, and no call could be served")
    if former == wanted:
        return fleet
    changed = tuple(replace(release, weight=wanted[release.name]) for release in fleet.releases[model])
    return replace(fleet, releases={**fleet.releases, model: changed}, earlier={**fleet.earlier, model: former})


_ROUNDING = 0.0051  # above any gain of a share that comes from writing it in percent


def with_share(fleet: Fleet, model: str, name: str, percent: int) -> Fleet:
    """Canary: ``name`` gets so many percent of the model's sessions, taken from the heaviest other release.

    Raises:
        ConfigError: as `with_weights`; or the heaviest other release has too few sessions.
    """
    fleet.release(model, name)
    weights = {release.name: release.weight for release in fleet.releases[model]}
    whole = sum(weights.values()) or 1
    others = {other: round(100 * weight / whole) for other, weight in weights.items() if other != name}
    if not others:
        raise ConfigError(f"{model} has no release but {name}, which has all sessions")
    giver = max(others, key=lambda other: others[other])
    left = 100 - percent - sum(share for other, share in others.items() if other != giver)
    if left < 0:
        raise ConfigError(f"{model}/{name} cannot have {percent} % of the sessions: the others have {others}")
    return with_weights(fleet, model, {**others, name: percent, giver: left})


def switched(fleet: Fleet, model: str, name: str) -> Fleet:
    """Blue-green: ``name`` gets all sessions; the other releases keep their replicas, for `rolled_back`.

    Raises:
        ConfigError: as `with_weights`.
    """
    others = {release.name: 0 for release in fleet.releases.get(model, ())}
    return with_weights(fleet, model, {**others, name: 100})


def rolled_back(fleet: Fleet, model: str) -> Fleet:
    """Restores the weights before their last change. A second call undoes the first.

    Raises:
        ConfigError: the weights never changed, or a release that would gain weight has no replica.
    """
    if model not in fleet.earlier:
        raise ConfigError(f"{model}: the weights have not been changed, so there is nothing to go back to")
    return with_weights(fleet, model, fleet.earlier[model])


def _with_release(fleet: Fleet, model: str, release: Release) -> Fleet:
    changed = tuple(release if known.name == release.name else known for known in fleet.releases[model])
    return replace(fleet, releases={**fleet.releases, model: changed})
