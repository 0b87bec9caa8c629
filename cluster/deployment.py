"""The deployment of one release: what its replicas are started with, and how many there are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict

from cluster.config import AutoscalingConfig, ClusterConfig, ReplicasConfig, check_addresses, check_keys
from specdec.config import Config, EngineConfig, merged, read_key
from specdec.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Deployment(BaseModel):
    """Plain data that is sent to every machine of the fleet."""

    model_config = ConfigDict(frozen=True)

    model: str
    release: str
    settings: dict[str, Any]  # of `specdec serve`
    python: Path | None
    replicas: ReplicasConfig
    autoscaling: AutoscalingConfig
    drain_s: float
    folder: Path  # for the replicas' configurations and logs
    host: str = LOOPBACK  # address of the replicas; empty: that of each replica's machine
    key: str = ""  # of server.keys_file, for requests to /v1/loads
    restarts: int = 0  # how often all replicas were replaced without a change of settings

    @property
    def app(self) -> str:
        """The name of its Ray Serve application."""
        return f"{self.model}.{self.release}"

    @property
    def version(self) -> str:
        """Changes when every replica has to be replaced. The number of replicas is not part of it; their cores are,
        which set their threads."""
        cpus = self.replicas.cpus
        what = (self.settings, self.python, self.host, self.key, self.drain_s, self.restarts, cpus)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    def scaled(self, low: int, high: int) -> Deployment:
        """Returns a copy with other bounds for the number of replicas.

        Raises:
            ConfigError: the bounds are below 1 or out of order.
        """
        if not 1 <= low <= high:
            raise ConfigError(f"{low} to {high} replicas: the minimum must be at least 1 and not above the maximum")
        return self.model_copy(update={"replicas": self.replicas.model_copy(update={"min": low, "max": high})})

    def restarted(self) -> Deployment:
        """Returns a copy whose version differs, so that every replica is replaced."""
        return self.model_copy(update={"restarts": self.restarts + 1})


def deployment_of(config: ClusterConfig, model: str, release: str, *, host: str = LOOPBACK) -> Deployment:
    """The deployment of a release in cluster.yaml.

    Raises:
        ConfigError: there is no such model or release; its key cannot be read; replicas would share a port; or keys
            would cross the network in the clear.
    """
    found = config.model(model)
    own = found.releases.get(release)
    if own is None:
        raise ConfigError(f"{model} has no release {release!r}; there are: {', '.join(found.releases)}")
    check = check_addresses if host == LOOPBACK else check_keys
    check(found.server_config(release), f"{model}.{release}")
    return Deployment(
        model=model,
        release=release,
        settings=_with_fixed_paths(merged(found.settings, own.settings), Config),
        python=own.python,
        replicas=found.replicas,
        autoscaling=found.autoscaling,
        drain_s=config.drain_s,
        folder=config.folder,
        host=host,
        key="" if found.key_file is None else read_key(found.key_file, f"{model}.key_file"),
    )


_MODELS = ("target", "draft", "draft_head")  # fields of an engine that name a model, or are the path of one


def _with_fixed_paths(value: Any, kind: Any) -> Any:
    """``value``, of type ``kind``, with absolute paths: replicas may run in another folder."""
    if isinstance(value, Mapping) and get_origin(kind) is dict:
        return {name: _with_fixed_paths(inner, get_args(kind)[1]) for name, inner in value.items()}
    if isinstance(value, Mapping):
        found = {name: _with_fixed_paths(inner, kind.model_fields[name].annotation) for name, inner in value.items()}
        models = _MODELS if kind is EngineConfig else ()
        return found | {name: _fixed(value[name]) for name in models if _is_file(value.get(name))}
    if isinstance(value, list | tuple) and get_origin(kind) is tuple:
        return [_with_fixed_paths(inner, get_args(kind)[0]) for inner in value]
    return _fixed(value) if isinstance(value, str) and _is_path(kind) else value


def _is_path(kind: Any) -> bool:
    return kind is Path or any(_is_path(inner) for inner in get_args(kind))


def _fixed(path: str) -> str:
    """An absolute path. That of a home stays, since the replica's machine may have another one."""
    return path if path.startswith("~") else str(Path(path).absolute())


def _is_file(model: Any) -> bool:
    return isinstance(model, str) and (model.startswith(".") or model.endswith(".gguf") or os.path.exists(model))
