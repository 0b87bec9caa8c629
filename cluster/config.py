"""What cluster.yaml says: which models, by how many replicas each, where clients connect, how calls are spread."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.replica_settings import check_files
from specdec.config import Config, Name, merged, problems, read_mapping
from specdec.errors import ConfigError

HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
WORKSPACE_HEADER, SESSION_HEADER = "x-workspace-id", "x-session-id"
FIRST_RELEASE = "blue"
# What `specdec plan` simulates is what Envoy does: both take these.
RING_PLACES = 4096  # at least, of all replicas together; with a thousand for each of four, shares differ by 3 % or so
BALANCE_PERCENT = 125  # of the mean of running calls, which a replica may have and still be given more


class ListenConfig(BaseModel):
    """Where clients connect. Every model has ports of its own, so that each dialect's paths stay as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address that Envoy listens on; 0.0.0.0: all")
    admin_port: int = Field(8499, ge=0, le=65535, description="Envoy's own figures, on loopback only; 0: any free one")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key: TLS only")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert")
    tls_client_ca: Path | None = Field(None, description="PEM authorities; clients must show a certificate of theirs")

    @field_validator("host")
    @classmethod
    def _is_address(cls, host: str) -> str:
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            raise ValueError(f"{host!r} is no address, which Envoy needs; 127.0.0.1 for localhost") from None

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ListenConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{given} needs {missing}: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: clients are known by certificate only over TLS")
        return self


class RoutingConfig(BaseModel):
    """How calls are spread over the replicas of a release."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    affinity_headers: tuple[HeaderName, ...] = Field(
        (WORKSPACE_HEADER, SESSION_HEADER),
        description="headers or gRPC metadata that keep calls on one replica; the first there is",
    )
    hash_balance_factor: int = Field(
        BALANCE_PERCENT, ge=101, le=1000,
        description="a replica's running calls, at most so many of the mean; more go to the next",
        json_schema_extra={"unit": "percent"},
    )  # fmt: skip
    retries: int = Field(
        3, ge=0, le=10, description="on other replicas, of a call that no byte came back for",
        json_schema_extra={"unit": "tries"},
    )  # fmt: skip
    connect_s: float = Field(
        1.0, gt=0, description="a replica that does not take a connection for so long is passed by"
    )


class HealthConfig(BaseModel):
    """When a replica gets no calls though it is listed: asked for /readyz, and watched in what it answers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    interval_s: float = Field(1.0, gt=0, le=60, description="between two probes of /readyz")
    timeout_s: float = Field(2.0, gt=0, le=60, description="a probe that takes longer has failed")
    unhealthy_after: int = Field(2, ge=1, description="failed probes in a row", json_schema_extra={"unit": "probes"})
    eject_after: int = Field(
        5, ge=1, description="in a row: 5xx answers, over gRPC broken connections", json_schema_extra={"unit": "errors"}
    )
    ejected_s: float = Field(10.0, gt=0, description="how long for the first time; each further time adds as much")
    max_ejected_percent: int = Field(
        50, ge=0, le=100, description="of a release's replicas ejected at once, at most",
        json_schema_extra={"unit": "percent"},
    )  # fmt: skip


class AutoscalingConfig(BaseModel):
    """When replicas are added and taken away, between ``min`` and ``max``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target_waiting: float = Field(
        2.0, gt=0, description="requests that wait in a replica, in the mean; above it one is added",
        json_schema_extra={"unit": "requests"},
    )  # fmt: skip
    target_wait_s: float = Field(1.0, gt=0, description="until the first token, as admission forecasts it; as above")
    period_s: float = Field(5.0, gt=0, description="between two looks at the load")
    up_after_s: float = Field(5.0, ge=0, description="the load must be above the target for so long")
    down_after_s: float = Field(300.0, ge=0, description="the load must be below the target for so long")


class ReplicasConfig(BaseModel):
    """How many, and what each one takes of its machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min: int = Field(1, ge=1, description="replicas at least", json_schema_extra={"unit": "replicas"})
    max: int = Field(1, ge=1, description="replicas at most", json_schema_extra={"unit": "replicas"})
    cpus: float = Field(1.0, gt=0, description="cores that are set aside for each", json_schema_extra={"unit": "cores"})
    gpus: float = Field(0.0, ge=0, description="GPUs that are set aside for each", json_schema_extra={"unit": "GPUs"})
    memory_bytes: int = Field(0, ge=0, description="memory that is set aside for each; 0: not counted")

    @field_validator("gpus")
    @classmethod
    def _can_be_set_aside(cls, gpus: float) -> float:
        if gpus > 1 and gpus % 1:
            raise ValueError(f"{gpus:g} GPUs can not be set aside: above 1 it must be a whole number")
        return gpus

    @model_validator(mode="after")
    def _in_order(self) -> ReplicasConfig:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, above max, which is {self.max}")
        return self


class ReleaseConfig(BaseModel):
    """One of a model's releases: its share of the sessions, and in what it differs from the model's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: int = Field(
        100, ge=0, le=100, description="of the sessions; 0: none yet", json_schema_extra={"unit": "percent"}
    )
    python: Path | None = Field(None, description="interpreter whose specdec runs it; null: the one that runs this")
    settings: dict[str, Any] = Field({}, description="`engine:` and `server:`, laid over the model's own")


class ModelConfig(BaseModel):
    """A model of the fleet.

    ``settings`` is what a file of ``specdec serve`` holds; ports and host in it are the fleet's to choose, and
    ``{replica}`` in any text stands for the replica's id, which files that replicas write need. ``releases``
    are in the order of their coming, oldest first; weights that do not make 100 in all count by their proportions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name = Field(description="as `specdec cluster` calls it")
    http_port: int | None = Field(8401, ge=1, le=65535, description="where clients reach it over HTTP; null: nowhere")
    grpc_port: int | None = Field(8400, ge=1, le=65535, description="where clients reach it over gRPC; null: nowhere")
    settings: dict[str, Any] = Field({}, description="`engine:` and `server:`, as `specdec serve --config` reads them")
    key_file: Path | None = Field(
        None, description="file with a key of the settings' keys_file, by which replicas are asked for their load"
    )
    replicas: ReplicasConfig = ReplicasConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    releases: dict[Name, ReleaseConfig] = Field(
        {FIRST_RELEASE: ReleaseConfig()}, min_length=1, description="by name, oldest first"
    )

    @model_validator(mode="after")
    def _can_be_served(self) -> ModelConfig:
        if self.http_port is None and self.grpc_port is None:
            raise ValueError("http_port and grpc_port are both null: clients could not reach it")
        if not any(release.weight for release in self.releases.values()):
            raise ValueError("releases: one needs a weight above 0")
        for name in self.releases:
            try:
                config = self.server_config(name)
                check_files(config)
            except ValidationError as error:
                raise ValueError(f"settings of release {name}: {problems(error)}") from None
            except ValueError as error:
                raise ValueError(f"settings of release {name}: {error}") from None
            server = config.server
            if server.tls_cert is not None:
                raise ValueError(
                    f"settings of release {name}: server.tls_cert: Envoy speaks to replicas in the clear; "
                    "clients get TLS by listen.tls_cert and tls_key of the cluster"
                )
            if server.keys_file is not None and self.key_file is None:
                raise ValueError(
                    f"settings of release {name}: server.keys_file needs the model's key_file, a key of it by which "
                    "replicas are asked for their load"
                )
        return self

    def server_config(self, release: str) -> Config:
        """What a replica of ``release`` is started with, before it is given its ports.

        Raises:
            ValidationError: a setting is unknown or out of range.
        """
        return Config.model_validate(merged(self.settings, self.releases[release].settings))


class ClusterConfig(BaseModel):
    """The whole of cluster.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    models: tuple[ModelConfig, ...] = Field(min_length=1, description="each with its own ports and replicas")
    listen: ListenConfig = ListenConfig()
    routing: RoutingConfig = RoutingConfig()
    health: HealthConfig = HealthConfig()
    drain_s: float = Field(30.0, ge=0, description="how long a replica that is taken away may finish its calls")
    folder: Path = Field(Path("~/.cache/specdec/cluster"), description="Envoy's files and logs, and what the fleet is")

    @field_validator("folder")
    @classmethod
    def _is_the_same_wherever_it_is_read(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()

    @field_validator("models")
    @classmethod
    def _stand_apart(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        names: set[str] = set()
        ports: dict[int, str] = {}
        for model in models:
            if model.name in names:
                raise ValueError(f"two models are called {model.name!r}")
            names.add(model.name)
            for place, port in _ports(model):
                if (owner := ports.setdefault(port, place)) != place:
                    raise ValueError(f"{place} is {port}, as {owner} is; each model needs ports of its own")
        return models

    @model_validator(mode="after")
    def _admin_stands_apart(self) -> ClusterConfig:
        for model in self.models:
            for place, port in _ports(model):
                if port == self.listen.admin_port:
                    raise ValueError(f"listen.admin_port is {port}, as {place} is")
        return self

    def model(self, name: str) -> ModelConfig:
        """The model of that name.

        Raises:
            ConfigError: there is none.
        """
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise ConfigError(f"no model {name!r} in the cluster; there are: {known}")


def load_cluster_config(path: Path) -> ClusterConfig:
    """Read cluster.yaml.

    Raises:
        ConfigError: the file can not be read, or a field is unknown or out of range; names every such field.
    """
    data: Mapping[str, Any] = read_mapping(path, "`models:`")
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problems(error)}") from None


def fixed_changes(running: ClusterConfig, changed: ClusterConfig) -> list[str]:
    """What differs though it can not while a fleet runs, by field: Envoy listens by it from its start on."""
    former, now = _fixed(running), _fixed(changed)
    return [field for field in dict.fromkeys((*former, *now)) if former.get(field, _NONE) != now.get(field, _NONE)]


_NONE = object()


def _fixed(config: ClusterConfig) -> dict[str, object]:
    found: dict[str, object] = {"folder": config.folder.expanduser()}
    found |= {f"listen.{field}": value for field, value in config.listen}
    for model in config.models:
        found |= {f"{model.name}.http_port": model.http_port, f"{model.name}.grpc_port": model.grpc_port}
    return found


def _ports(model: ModelConfig) -> Iterator[tuple[str, int]]:
    for field, port in (("http_port", model.http_port), ("grpc_port", model.grpc_port)):
        if port is not None:
            yield f"{model.name}.{field}", port
