"""What is deployed of one release: everything that a replica is started with, and how many there are to be."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from cluster.autoscale import ScalingRule
from cluster.config import AutoscalingConfig, ClusterConfig, ModelConfig, ReplicasConfig
from cluster.replica_settings import check_addresses
from specdec.config import merged
from specdec.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Deployment(BaseModel):
    """Plain data, which travels to every machine of the fleet.

    ``settings``: of `specdec serve`. ``host``: the address of replicas; empty: each has that of its machine.
    ``folder``: for their configurations and logs. ``key``: of the settings' keys file, by which replicas are asked for
    their load. ``restarts``: how often all of them were replaced for no change of settings.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    release: str
    settings: dict[str, Any]
    python: Path | None
    replicas: ReplicasConfig
    autoscaling: AutoscalingConfig
    drain_s: float
    interval_s: float
    folder: Path
    host: str = LOOPBACK
    key: str = ""
    restarts: int = 0

    @property
    def app(self) -> str:
        """What Ray Serve calls it."""
        return f"{self.model}.{self.release}"

    @property
    def version(self) -> str:
        """Another one: every replica has to be replaced. How many there are is no part of it."""
        what = (self.settings, self.python, self.host, self.key, self.drain_s, self.interval_s, self.restarts)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    @property
    def rule(self) -> ScalingRule:
        """By which their number changes, between bounds that may be one."""
        return ScalingRule(self.replicas.min, self.replicas.max, **self.autoscaling.model_dump())

    def scaled(self, low: int, high: int) -> Deployment:
        """With other bounds of how many replicas there are.

        Raises:
            ConfigError: there would be none, or at least more than at most.
        """
        if not 1 <= low <= high:
            raise ConfigError(f"{low} to {high} replicas: there must be at least one, and not more than at most")
        return self.model_copy(update={"replicas": self.replicas.model_copy(update={"min": low, "max": high})})

    def restarted(self) -> Deployment:
        """The same, to replace every replica of this one."""
        return self.model_copy(update={"restarts": self.restarts + 1})


def deployment_of(config: ClusterConfig, model: str, release: str, *, host: str = LOOPBACK) -> Deployment:
    """What cluster.yaml says of a release.

    Raises:
        ConfigError: there is no such model or release; its key can not be read; or replicas would listen at one port.
    """
    found = config.model(model)
    own = found.releases.get(release)
    if own is None:
        raise ConfigError(f"{model} has no release {release!r}; there are: {', '.join(found.releases)}")
    if host == LOOPBACK:
        check_addresses(found.server_config(release), f"{model}.{release}")
    return Deployment(
        model=model,
        release=release,
        settings=merged(found.settings, own.settings),
        python=own.python,
        replicas=found.replicas,
        autoscaling=found.autoscaling,
        drain_s=config.drain_s,
        interval_s=config.health.interval_s,
        folder=config.folder.expanduser(),
        host=host,
        key=_key(found),
    )


def _key(model: ModelConfig) -> str:
    if model.key_file is None:
        return ""
    try:
        return model.key_file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{model.name}.key_file: {model.key_file} can not be read: {error}") from None
