"""cluster.yaml: the models of a fleet, their replicas and releases, the listeners and the routing."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic.functional_validators import AfterValidator

from specdec.config import Config, Name, Section, UserPath, check_tls, merged, problems, read_mapping
from specdec.errors import ConfigError

# Absolute, because actors of Ray read it too and may run in another folder.
FixedPath = Annotated[UserPath, AfterValidator(Path.absolute)]
Face = Literal["http", "grpc"]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$", to_lower=True)]
WORKSPACE_HEADER, SESSION_HEADER = "x-workspace-id", "x-session-id"
FIRST_RELEASE = "blue"
REPLICA_PLACEHOLDER = "{replica}"  # stands for the replica's id in any text of the settings
# Envoy and the simulation of `specdec plan` share these two.
RING_PLACES = 4096  # minimum ring size over all replicas; with four replicas, their shares differ by about 3 %
BALANCE_PERCENT = 125  # of the mean number of running calls: the limit up to which a replica gets more


class ListenConfig(Section):
    """Where clients connect. Each model has its own ports, so that every dialect keeps its paths."""

    host: str = Field("127.0.0.1", description="address that Envoy listens on; 0.0.0.0: all interfaces")
    admin_port: int = Field(
        8499, ge=0, le=65535, description="Envoy's admin interface, on loopback only; 0: any free port"
    )
    tls_cert: FixedPath | None = Field(None, description="PEM certificate chain; with tls_key, clients must use TLS")
    tls_key: FixedPath | None = Field(None, description="PEM private key of tls_cert")
    tls_client_ca: FixedPath | None = Field(
        None, description="PEM authorities; clients need a certificate signed by one"
    )

    @field_validator("host")
    @classmethod
    def _is_address(cls, host: str) -> str:
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            raise ValueError(f"{host!r} is not an IP address; use 127.0.0.1 for localhost") from None

    @model_validator(mode="after")
    def _tls_is_complete(self) -> ListenConfig:
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)
        return self


class RoutingConfig(Section):
    """How Envoy distributes calls over the replicas of a release."""

    affinity_headers: tuple[HeaderName, ...] = Field(
        (WORKSPACE_HEADER, SESSION_HEADER),
        description="headers or gRPC metadata whose value keeps calls on one replica; the first one present counts",
    )
    retries: int = Field(
        3, ge=0, le=10, description="retries on other replicas of a call that has received no byte",
        json_schema_extra={"unit": "tries"},
    )  # fmt: skip


class HealthConfig(Section):
    """When Envoy stops sending calls to a listed replica: failed probes of /readyz, or errors in its answers."""

    interval_s: float = Field(1.0, gt=0, le=60, description="time between two probes of /readyz")


class AutoscalingConfig(Section):
    """When the fleet adds and removes replicas, between ``min`` and ``max``."""

    target_waiting: float = Field(
        2.0, gt=0, description="mean waiting requests per replica, above which the fleet grows",
        json_schema_extra={"unit": "requests"},
    )  # fmt: skip
    target_wait_s: float = Field(
        1.0, gt=0, description="mean forecast wait for the first token, above which the fleet grows"
    )
    period_s: float = Field(5.0, gt=0, description="time between two evaluations of the load")
    up_after_s: float = Field(5.0, ge=0, description="how long the load must stay above the target")
    down_after_s: float = Field(300.0, ge=0, description="how long the load must stay below the target")


class ReplicasConfig(Section):
    """The number of replicas, and the resources that each one reserves."""

    min: int = Field(1, ge=1, description="minimum number", json_schema_extra={"unit": "replicas"})
    max: int = Field(1, ge=1, description="maximum number", json_schema_extra={"unit": "replicas"})
    cpus: float | None = Field(
        None, gt=0, json_schema_extra={"unit": "cores"},
        description="cores reserved for each replica, and its threads where engine.threads is 0; null: one, "
        "and a thread for each core of the machine",
    )  # fmt: skip
    gpus: float = Field(0.0, ge=0, description="GPUs reserved for each replica", json_schema_extra={"unit": "GPUs"})
    memory_bytes: int = Field(0, ge=0, description="memory reserved for each replica; 0: none")

    @field_validator("gpus")
    @classmethod
    def _can_be_reserved(cls, gpus: float) -> float:
        if gpus > 1 and gpus % 1:
            raise ValueError(f"{gpus:g} GPUs cannot be reserved: above 1 the number must be whole")
        return gpus

    @model_validator(mode="after")
    def _in_order(self) -> ReplicasConfig:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, above max ({self.max})")
        return self


class ReleaseConfig(Section):
    """One release of a model: its share of the sessions, and the settings that override the model's."""

    weight: int = Field(
        100, ge=0, le=100, description="share of the sessions; 0: none", json_schema_extra={"unit": "percent"}
    )
    python: Path | None = Field(None, description="interpreter that runs specdec; null: the one of `specdec cluster`")
    settings: dict[str, Any] = Field({}, description="`engine:` and `server:`, merged over the model's settings")

    @field_validator("python", mode="before")
    @classmethod
    def _is_fixed(cls, python: Any) -> Any:
        """As `FixedPath`, but a bare name is looked up on the PATH, and `~` expanded, on the replica's machine."""
        is_path = isinstance(python, str | Path) and os.sep in str(python) and not str(python).startswith("~")
        return str(Path(python).absolute()) if is_path else python


class ModelConfig(Section):
    """A model of the fleet.

    The fleet chooses host and ports of ``settings``. ``{replica}`` in any text of them stands for the replica's id;
    paths that replicas write to need it. Weights of ``releases`` that do not add up to 100 count in proportion.
    """

    name: Name = Field(description="name for `specdec cluster`")
    http_port: int | None = Field(8401, ge=1, le=65535, description="port for HTTP clients; null: none")
    grpc_port: int | None = Field(8400, ge=1, le=65535, description="port for gRPC clients; null: none")
    settings: dict[str, Any] = Field({}, description="`engine:` and `server:`, as `specdec serve --config` reads them")
    key_file: UserPath | None = Field(
        None, description="file with a key of server.keys_file, for requests to /v1/loads of the replicas"
    )
    replicas: ReplicasConfig = ReplicasConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    releases: dict[Name, ReleaseConfig] = Field(
        {FIRST_RELEASE: ReleaseConfig()}, description="releases by name, oldest first"
    )

    @field_validator("releases", mode="before")
    @classmethod
    def _releases_may_be_empty(cls, releases: Any) -> Any:
        if not isinstance(releases, dict):
            return releases
        return {name: {} if release is None else release for name, release in releases.items()}

    @model_validator(mode="after")
    def _can_be_served(self) -> ModelConfig:
        if not self.ports:
            raise ValueError("http_port and grpc_port are both null: no client could connect")
        if not any(release.weight for release in self.releases.values()):
            raise ValueError("releases: at least one needs a weight above 0")
        for name in self.releases:
            try:
                _check_settings(self.server_config(name), self.key_file)
            except ValidationError as error:
                raise ValueError(f"settings of release {name}: {problems(error, Config)}") from None
            except ValueError as error:
                raise ValueError(f"settings of release {name}: {error}") from None
        return self

    @property
    def ports(self) -> dict[Face, int]:
        """The ports for clients, by protocol."""
        ports: dict[Face, int | None] = {"http": self.http_port, "grpc": self.grpc_port}
        return {face: port for face, port in ports.items() if port is not None}

    def server_config(self, release: str) -> Config:
        """The configuration of a replica of ``release``, without its ports.

        Raises:
            ValidationError: a setting is unknown or out of range.
        """
        return Config.model_validate(merged(self.settings, self.releases[release].settings))


class ClusterConfig(Section):
    """The content of cluster.yaml."""

    models: tuple[ModelConfig, ...] = Field(description="each with its own ports and replicas")
    listen: ListenConfig = ListenConfig()
    routing: RoutingConfig = RoutingConfig()
    health: HealthConfig = HealthConfig()
    drain_s: float = Field(30.0, ge=0, description="how long a replica may finish its calls before it stops")
    folder: FixedPath = Field(
        Path("~/.cache/specdec/cluster"), description="Envoy's files, logs and the state of the fleet"
    )

    @field_validator("models")
    @classmethod
    def _differ(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        if not models:  # `min_length` would count the valid ones only, and complain about a single invalid one
            raise ValueError("must name at least one model")
        names: set[str] = set()
        apps: dict[str, str] = {}
        for model in models:
            if model.name in names:
                raise ValueError(f"two models are named {model.name!r}")
            names.add(model.name)
            for app in (f"{model.name}.{release}" for release in model.releases):
                if (owner := apps.setdefault(app, model.name)) != model.name:
                    raise ValueError(f"{app} is a release of {owner} and of {model.name}; rename one of them")
        return models

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterConfig:
        ports: dict[int, str] = {}
        used = [(f"{model.name}.{face}_port", port) for model in self.models for face, port in model.ports.items()]
        for place, port in (*used, ("listen.admin_port", self.listen.admin_port)):
            if (owner := ports.setdefault(port, place)) != place:
                raise ValueError(f"{place} is {port}, the same as {owner}; each needs its own")
        return self

    def model(self, name: str) -> ModelConfig:
        """Returns the model ``name``.

        Raises:
            ConfigError: there is no such model.
        """
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise ConfigError(f"no model {name!r} in the cluster; there are: {known}")


def load_cluster_config(path: Path) -> ClusterConfig:
    """Read cluster.yaml.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or out of range; names every such field.
    """
    data: Mapping[str, Any] = read_mapping(path, "`models:`")
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problems(error, ClusterConfig)}") from None


def fixed_changes(running: ClusterConfig, changed: ClusterConfig) -> list[str]:
    """Names of the changed fields that a running fleet cannot adopt: Envoy reads them only at its start."""
    former, now = _fixed(running), _fixed(changed)
    differ = {field for field, _ in former.items() ^ now.items()}
    return [field for field in former | now if field in differ]


def _fixed(config: ClusterConfig) -> dict[str, object]:
    found: dict[str, object] = {"folder": config.folder}
    found |= {f"listen.{field}": value for field, value in config.listen}
    for model in config.models:
        found |= {f"{model.name}.http_port": model.http_port, f"{model.name}.grpc_port": model.grpc_port}
    return found


def authority(host: str, port: int) -> str:
    """``host:port`` as in a URL, where an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def settings_of(settings: Any, replica_id: str) -> Any:
    """``settings`` with the replica's id in place of ``{replica}``."""
    if isinstance(settings, str):
        return settings.replace(REPLICA_PLACEHOLDER, replica_id)
    if isinstance(settings, dict):
        return {name: settings_of(value, replica_id) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [settings_of(value, replica_id) for value in settings]
    return settings


def check_addresses(config: Config, release: str) -> None:
    """Check that replicas of ``release`` can share a machine.

    Raises:
        ConfigError: every replica would listen on the same port.
    """
    for field, address in _listen_addresses(config):
        if address.startswith("tcp://"):
            raise ConfigError(
                f"settings of {release}: {field}: replicas on one machine cannot all listen on {address}; "
                f"use ipc:// with {REPLICA_PLACEHOLDER} in the path, or connect: true if the router listens"
            )


def check_keys(config: Config, release: str) -> None:
    """Check that keys stay secret where replicas of ``release`` listen on their machines' addresses.

    Raises:
        ConfigError: they would cross the network in the clear, which the settings do not allow.
    """
    if config.server.keys_file is not None and not config.server.keys_without_tls:
        raise ConfigError(
            f"settings of {release}: server.keys_file: on several machines Envoy connects to replicas without TLS, so "
            "keys would cross the network in the clear; if that network is private, set server.keys_without_tls: true"
        )


def _check_settings(config: Config, key_file: Path | None) -> None:
    """Raises ValueError if all replicas would write to one path, or if Envoy or the fleet could not call them."""
    for field, path in _written_paths(config):
        if path is not None and REPLICA_PLACEHOLDER not in str(path):
            raise ValueError(f"{field}: every replica would write {path}; put {REPLICA_PLACEHOLDER} into the path")
    if config.server.tls_cert is not None:
        raise ValueError(
            "server.tls_cert: Envoy connects to replicas without TLS; set listen.tls_cert and listen.tls_key of the "
            "cluster instead"
        )
    if config.server.keys_file is not None and key_file is None:
        raise ValueError("server.keys_file needs the model's key_file, with a key for requests to /v1/loads")


def _written_paths(config: Config) -> Iterator[tuple[str, Any]]:
    engines = {f"engines.{name}": engine for name, engine in config.engines.items()} or {"engine": config.engine}
    for name, engine in engines.items():
        yield f"{name}.speculation.trace_file", engine.speculation.trace_file
    yield "server.capture_dir", config.server.capture_dir
    yield "server.experiments.folder", config.server.experiments.folder
    for field, address in _listen_addresses(config):
        if address.startswith("ipc://"):
            yield field, address


def _listen_addresses(config: Config) -> Iterator[tuple[str, str]]:
    events = config.server.kv_events
    if events.endpoint is not None and not events.connect:
        yield "server.kv_events.endpoint", events.endpoint
    if events.replay_endpoint is not None:
        yield "server.kv_events.replay_endpoint", events.replay_endpoint
