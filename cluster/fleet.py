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
    """One release of a model, and its replicas."""

    weight: int  # share of the sessions, relative to the model's other releases
    fingerprint: str = ""
    """Numeric fingerprint of the first replica that became ready; replicas with another one get no calls."""
    replicas: tuple[Replica, ...] = ()  # by id

    @property
    def pool(self) -> tuple[Replica, ...]:
        """The replicas that may get calls: ready, with the release's fingerprint."""
        return tuple(replica for replica in self._ready if replica.fingerprint == self.fingerprint)

    @property
    def misfits(self) -> tuple[Replica, ...]:
        """Ready replicas that get no calls because their fingerprint differs from the release's."""
        return tuple(replica for replica in self._ready if replica.fingerprint != self.fingerprint)

    @property
    def _ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Releases and replicas of all models."""

    releases: Mapping[str, Mapping[str, Release]]  # by model and name, oldest first
    earlier: Mapping[str, Mapping[str, int]]  # weights before their last change, by model and release

    @classmethod
    def of(cls, config: ClusterConfig) -> Fleet:
        """The releases of ``config``, without replicas."""
        releases = {
            model.name: {name: Release(release.weight) for name, release in model.releases.items()}
            for model in config.models
        }
        return cls(releases, {})

    def release(self, model: str, name: str) -> Release:
        """Returns a release by its name.

        Raises:
            ConfigError: there is no such model or release.
        """
        if name not in (known := self.weights(model)):
            raise ConfigError(f"{model} has no release {name!r}; there are: {', '.join(known)}")
        return self.releases[model][name]

    def weights(self, model: str) -> dict[str, int]:
        """The weights of a model's releases, oldest first.

        Raises:
            ConfigError: there is no such model.
        """
        if model not in self.releases:
            raise ConfigError(f"no model {model!r} in the fleet; there are: {', '.join(self.releases)}")
        return {name: release.weight for name, release in self.releases[model].items()}

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those of all releases."""
        releases = (release for by_name in self.releases.values() for release in by_name.values())
        return tuple(replica for release in releases for replica in release.replicas)

    def replica(self, replica_id: str) -> Replica | None:
        """Returns a replica by its id, or None."""
        return next((replica for replica in self.replicas if replica.id == replica_id), None)

    def live(self, model: str) -> str:
        """The release that calls without a session go to: the heaviest that has replicas, else the heaviest. Of two
        equal ones the older."""
        weights = self.weights(model)
        able = [name for name, weight in weights.items() if weight and self.releases[model][name].pool]
        return max(able or weights, key=weights.__getitem__)

    def shares(self, model: str) -> list[tuple[str, int]]:
        """Releases and their weights, newest first, so that a growing canary keeps its sessions. The share of a release
        without replicas goes to the live release, at the same place in the list."""
        live, oldest_first = self.live(model), [*self.releases[model].items()]
        return [
            (name if release.pool else live, release.weight)
            for name, release in reversed(oldest_first)
            if release.weight
        ]


def with_replica(fleet: Fleet, replica: Replica) -> Fleet:
    """Adds or updates ``replica``. The first ready replica of a release sets the release's fingerprint.

    Raises:
        ConfigError: there is no such model or release.
    """
    release = fleet.release(replica.model, replica.release)
    others = (known for known in release.replicas if known.id != replica.id)
    replicas = tuple(sorted((*others, replica), key=lambda known: known.id))
    fingerprint = release.fingerprint or (replica.fingerprint if replica.state is ReplicaState.READY else "")
    changed = replace(release, fingerprint=fingerprint, replicas=replicas)
    return _changed(fleet, replica.model, {replica.release: changed})


def without_replica(fleet: Fleet, replica_id: str) -> Fleet:
    """Removes a replica. If it was the last one with its release's fingerprint, the release takes the fingerprint of
    another ready replica, if there is one."""
    gone = fleet.replica(replica_id)
    if gone is None:
        return fleet
    former = fleet.release(gone.model, gone.release)
    left = replace(former, replicas=tuple(replica for replica in former.replicas if replica.id != replica_id))
    if all(replica.fingerprint != former.fingerprint for replica in left.replicas):
        left = replace(left, fingerprint=left.misfits[0].fingerprint if left.misfits else "")
    return _changed(fleet, gone.model, {gone.release: left})


def _changed(fleet: Fleet, model: str, releases: Mapping[str, Release]) -> Fleet:
    """With other ``releases`` of a model, new ones behind those that there are."""
    return replace(fleet, releases={**fleet.releases, model: {**fleet.releases.get(model, {}), **releases}})


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
    return fleet if name in fleet.releases.get(model, {}) else _changed(fleet, model, {name: Release(0)})


def without_release(fleet: Fleet, model: str, name: str) -> Fleet:
    """Removes a release.

    Raises:
        ConfigError: it still has replicas or sessions.
    """
    release = fleet.release(model, name)
    if release.weight:
        raise ConfigError(f"{model}/{name} has {release.weight} of the sessions; give it the weight 0 first")
    if release.replicas:
        raise ConfigError(f"{model}/{name} has replicas; drain them first")
    left = {kept: release for kept, release in fleet.releases[model].items() if kept != name}
    earlier = {which: weights for which, weights in fleet.earlier.items() if which != model or name not in weights}
    return replace(fleet, releases={**fleet.releases, model: left}, earlier=earlier)


def with_weights(fleet: Fleet, model: str, weights: Mapping[str, int]) -> Fleet:
    """Changes ``weights``, by release; releases that are not named keep theirs.

    Raises:
        ConfigError: a release is unknown, no release would have a weight, or the share of a named release without a
            ready replica would grow.
    """
    former = fleet.weights(model)
    wanted = {**former, **weights}
    before, after = sum(former.values()) or 1, sum(wanted.values()) or 1
    for name, weight in weights.items():
        release = fleet.release(model, name)
        gain = weight / after - release.weight / before
        if (gain > _ROUNDING or (weight and not release.weight)) and not release.pool:
            raise ConfigError(f"{model}/{name} has no replica that is ready; start some before it gets sessions")
    if not any(wanted.values()):
        raise ConfigError(f"{model}: every release would have the weight 0, and no call could be served")
    if former == wanted:
        return fleet
    changed = {name: replace(fleet.release(model, name), weight=weight) for name, weight in weights.items()}
    return replace(_changed(fleet, model, changed), earlier={**fleet.earlier, model: former})


_ROUNDING = 0.0051  # above any gain of a share that comes from writing it in percent


def with_share(fleet: Fleet, model: str, name: str, percent: int) -> Fleet:
    """Canary: ``name`` gets so many percent of the model's sessions, taken from the heaviest other release.

    Raises:
        ConfigError: as `with_weights`; or the heaviest other release has too few sessions.
    """
    fleet.release(model, name)
    weights = fleet.weights(model)
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
    return with_weights(fleet, model, {**dict.fromkeys(fleet.weights(model), 0), name: 100})


def rolled_back(fleet: Fleet, model: str) -> Fleet:
    """Restores the weights before their last change. A second call undoes the first.

    Raises:
        ConfigError: the weights never changed, or a release that would gain weight has no replica.
    """
    if model not in fleet.earlier:
        raise ConfigError(f"{model}: the weights have not been changed, so there is nothing to go back to")
    return with_weights(fleet, model, fleet.earlier[model])
