"""From a fleet to Envoy's files.

The bootstrap (`bootstrap`) has what stays: listeners and the admin port. What changes with the fleet lies in files that
Envoy watches and takes over when another is renamed into their place, without a restart and without touching calls that
run: endpoints of each release, clusters, and routes. HTTP and gRPC, each model has a listener of its own for both.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.config import RING_PLACES, ClusterConfig, ModelConfig
from cluster.fleet import Fleet, Replica
from server.hold_headers import HOLD_HEADER
from specdec.errors import ConfigError

Json = dict[str, Any]
Face = Literal["http", "grpc"]
Spread = Literal["affine", "least"]
FACES: tuple[Face, ...] = ("http", "grpc")
SPREADS: tuple[Spread, ...] = ("affine", "least")
RELEASE_HEADER = "x-specdec-release"

_TYPES = "type.googleapis.com/envoy"
_OFF = "0s"
# Admission is each replica's own business; Envoy's own limits would only refuse what a replica may still take.
_NO_LIMIT = 1 << 20
# A server closes a connection that is idle for 75 s; Envoy is the first to, so that no call meets one that just closed.
_IDLE_S = 60.0
_HEADERS_S = 30.0


@dataclass(frozen=True, slots=True)
class EnvoyFiles:
    """Where the files are: ``folder`` is Envoy's alone."""

    folder: Path

    @property
    def bootstrap(self) -> Path:
        """What Envoy is started with."""
        return self.folder / "bootstrap.json"

    @property
    def clusters(self) -> Path:
        """The releases that there are, and how calls are spread inside of them."""
        return self.folder / "clusters.json"

    def routes(self, model: str, face: Face) -> Path:
        """Which calls of a listener go to which release."""
        return self.folder / f"routes.{model}.{face}.json"

    def endpoints(self, model: str, release: str, face: Face) -> Path:
        """The replicas of a release."""
        return self.folder / f"endpoints.{_service(model, release, face)}.json"

    @property
    def certificate(self) -> Path:
        """Where the listeners' certificate is found."""
        return self.folder / "certificate.json"


def write_bootstrap(config: ClusterConfig, files: EnvoyFiles) -> None:
    """What Envoy is started with; `write_fleet` comes first, so that there is something to be read."""
    if config.listen.tls_cert is not None:
        _write(files.certificate, _resources([_certificate(config)]))
    _write(files.bootstrap, bootstrap(config, files))


def write_fleet(config: ClusterConfig, fleet: Fleet, files: EnvoyFiles) -> list[Path]:
    """Bring the files up to date; returns those that changed. What calls are sent to comes before what sends them.

    Raises:
        ConfigError: a replica's host is no address; nothing was written.
    """
    wanted = dict(fleet_files(config, fleet, files))
    return [path for path, content in wanted.items() if _write(path, content)]


def fleet_files(config: ClusterConfig, fleet: Fleet, files: EnvoyFiles) -> Iterator[tuple[Path, Json]]:
    """Files and what they say, in the order in which they are to be written.

    Raises:
        ConfigError: a replica's host is no address.
    """
    clusters: list[Json] = []
    for model in config.models:
        for release in fleet.releases[model.name]:
            for face in _faces(model):
                service = _service(model.name, release.name, face)
                pool = fleet.pool(model.name, release.name)
                yield files.endpoints(model.name, release.name, face), _resources([_endpoints(service, pool, face)])
                watched = _watched(files.endpoints(model.name, release.name, face))
                clusters += [_cluster(config, service, face, spread, watched) for spread in SPREADS]
    yield files.clusters, _resources(clusters)
    for model in config.models:
        for face in _faces(model):
            yield files.routes(model.name, face), _resources([_routes(config, fleet, model, face)])


def bootstrap(config: ClusterConfig, files: EnvoyFiles) -> Json:
    """The admin port, on loopback only, and the listeners; what else there is comes from watched files."""
    listeners = [_listener(config, model, face, files) for model in config.models for face in _faces(model)]
    return {
        "node": {"id": "specdec", "cluster": "specdec"},
        "admin": {"address": _address("127.0.0.1", config.listen.admin_port)},
        "static_resources": {"listeners": listeners},
        "dynamic_resources": {"cds_config": _watched(files.clusters)},
    }


def _listener(config: ClusterConfig, model: ModelConfig, face: Face, files: EnvoyFiles) -> Json:
    port = model.http_port if face == "http" else model.grpc_port
    assert port is not None  # a face without a port is left out
    chain: Json = {"filters": [_connections(model, face, files)]}
    if config.listen.tls_cert is not None:
        chain["transport_socket"] = _downstream_tls(config, files)
    return {
        "name": f"{model.name}.{face}",
        "address": _address(config.listen.host, port),
        "filter_chains": [chain],
        "socket_options": _KEEP_ALIVE_OPTIONS,
        # Another Envoy on this port would take half of the calls, and neither would notice.
        "enable_reuse_port": False,
    }


# SO_KEEPALIVE, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT of Linux: a client whose machine is gone is noticed in 45 s.
_KEEP_ALIVE_OPTIONS = [
    {"level": level, "name": name, "int_value": value, "state": "STATE_PREBIND"}
    for level, name, value in ((1, 9, 1), (6, 4, 30), (6, 5, 5), (6, 6, 3))
]


def _connections(model: ModelConfig, face: Face, files: EnvoyFiles) -> Json:
    """What a listener does with a connection. No time limit ends a slow stream, and headers stay as they are."""
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": f"{model.name}.{face}",
            "codec_type": "AUTO",
            "rds": {
                "route_config_name": f"{model.name}.{face}",
                "config_source": _watched(files.routes(model.name, face)),
            },
            "http_filters": [
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {
                        "@type": f"{_TYPES}.extensions.filters.http.router.v3.Router",
                        "suppress_envoy_headers": True,
                    },
                }
            ],
            "stream_idle_timeout": _OFF,
            "request_timeout": _OFF,
            "request_headers_timeout": _seconds(_HEADERS_S),
            "use_remote_address": True,
            "generate_request_id": False,
            "preserve_external_request_id": True,
            "server_header_transformation": "PASS_THROUGH",
        },
    }


def _downstream_tls(config: ClusterConfig, files: EnvoyFiles) -> Json:
    """The certificate comes from a watched file, and is read again when it changes."""
    common: Json = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [
            {"name": "listeners", "sds_config": _watched(files.certificate)},
        ],
    }
    if config.listen.tls_client_ca is not None:
        common["validation_context"] = {"trusted_ca": _file(config.listen.tls_client_ca)}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": common,
            "require_client_certificate": config.listen.tls_client_ca is not None,
        },
    }


def _certificate(config: ClusterConfig) -> Json:
    cert, key = config.listen.tls_cert, config.listen.tls_key
    assert cert is not None  # the configuration is whole
    assert key is not None
    return {
        "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.Secret",
        "name": "listeners",
        "tls_certificate": {
            "certificate_chain": _file(cert),
            "private_key": _file(key),
            "watched_directory": {"path": str(cert.expanduser().absolute().parent)},
        },
    }


def _routes(config: ClusterConfig, fleet: Fleet, model: ModelConfig, face: Face) -> Json:
    """Calls with one of the affinity headers are split between the releases by the hash of its value, and go to the
    replica of that hash; calls without go to the live release, wherever least is running."""
    live = fleet.live(model.name)
    largest = max(model.server_config(name).server.max_message_bytes for name in model.releases)
    least: Json = {
        "cluster": _cluster_name(_service(model.name, live.name, face), "least"),
        **_route_settings(config, face),
    }
    routes: list[Json] = [
        {
            "match": {"prefix": "/", "headers": [{"name": header, "string_match": {"safe_regex": {"regex": ".+"}}}]},
            "route": {
                **_route_settings(config, face),
                "weighted_clusters": {"clusters": _split(fleet, model, face), "use_hash_policy": True},
                "hash_policy": [{"header": {"header_name": header}}],
            },
        }
        for header in config.routing.affinity_headers
    ]
    told = [_header(RELEASE_HEADER, live.name)]
    routes.append({"match": {"prefix": "/"}, "route": least, "response_headers_to_add": told})
    return {
        "@type": f"{_TYPES}.config.route.v3.RouteConfiguration",
        "name": f"{model.name}.{face}",
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "request_headers_to_add": [_header(HOLD_HEADER, "1", "ADD_IF_ABSENT")],
                "request_body_buffer_limit": largest,
                "routes": routes,
            }
        ],
    }


def _split(fleet: Fleet, model: ModelConfig, face: Face) -> list[Json]:
    """The same ranges as `cluster.canary.release_of` has, in the same order."""
    return [
        {
            "name": _cluster_name(_service(model.name, release, face), "affine"),
            "weight": weight,
            "response_headers_to_add": [_header(RELEASE_HEADER, release)],
        }
        for release, weight in fleet.shares(model.name)
    ]


def _route_settings(config: ClusterConfig, face: Face) -> Json:
    """No time limits; and another replica is asked for what no byte came back for. A replica that says it can not serve
    now, by 503 or UNAVAILABLE, has not begun either."""
    unable = "retriable-status-codes" if face == "http" else "unavailable"
    retry = {
        "retry_on": f"connect-failure,refused-stream,reset,{unable}",
        "num_retries": config.routing.retries,
        "retriable_status_codes": [503],
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
                },
            }
        ],
        # A dead replica has no call running, so the draw by least running calls prefers it until it is ejected.
        "host_selection_retry_max_attempts": 64,
    }
    return {"timeout": _OFF, "idle_timeout": _OFF, **({"retry_policy": retry} if config.routing.retries else {})}


def _cluster(config: ClusterConfig, service: str, face: Face, spread: Spread, watched: Json) -> Json:
    """One way of spreading calls over a release's replicas. A replica that leaves the list gets no further call, and
    finishes what it has."""
    health = config.health
    cluster: Json = {
        "@type": f"{_TYPES}.config.cluster.v3.Cluster",
        "name": _cluster_name(service, spread),
        "type": "EDS",
        "eds_cluster_config": {"service_name": service, "eds_config": watched},
        "connect_timeout": _seconds(config.routing.connect_s),
        "ignore_health_on_host_removal": True,
        # No merging of changes: a replica that is found to be healthy, or not, is so for calls from then on.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": _OFF},
        "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, _NO_LIMIT)]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _upstream_protocol(face)
        },
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 10, "keepalive_interval": 5}
        },
        "health_checks": [
            {
                "timeout": _seconds(health.timeout_s),
                "interval": _seconds(health.interval_s),
                "no_traffic_interval": _seconds(health.interval_s),
                "unhealthy_threshold": health.unhealthy_after,
                "healthy_threshold": 1,
                "http_health_check": {"host": "localhost", "path": "/readyz", "codec_client_type": "HTTP1"},
            }
        ],
        "outlier_detection": _outlier_detection(config, face),
    }
    if spread == "least":
        return cluster | {"lb_policy": "LEAST_REQUEST"}
    cluster["common_lb_config"]["consistent_hashing_lb_config"] = {
        "hash_balance_factor": config.routing.hash_balance_factor
    }
    return cluster | {"lb_policy": "RING_HASH", "ring_hash_lb_config": {"minimum_ring_size": RING_PLACES}}


_LIMITS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")


def _upstream_protocol(face: Face) -> Json:
    explicit: Json = {"http_protocol_options": {}}
    if face == "grpc":
        ping = {"interval": _seconds(30.0), "timeout": _seconds(10.0)}
        explicit = {"http2_protocol_options": {"connection_keepalive": ping}}
    return {
        "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": {"idle_timeout": _seconds(_IDLE_S)},
        "explicit_http_config": explicit,
    }


def _outlier_detection(config: ClusterConfig, face: Face) -> Json:
    """Errors in a row after which a replica gets no calls for a while. Over gRPC only broken connections count: Envoy
    can not tell a replica's failures from what calls bring upon themselves, such as a deadline that can not be met, of
    which many come in a row when there is much to do."""
    health = config.health
    by_answers, by_connections = (100, 0) if face == "http" else (0, 100)
    return {
        "consecutive_5xx": health.eject_after,
        "enforcing_consecutive_5xx": by_answers,
        "split_external_local_origin_errors": face == "grpc",
        "consecutive_local_origin_failure": health.eject_after,
        "enforcing_consecutive_local_origin_failure": by_connections,
        "interval": _seconds(1.0),
        "base_ejection_time": _seconds(health.ejected_s),
        "max_ejection_percent": health.max_ejected_percent,
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
    }


def _endpoints(service: str, pool: tuple[Replica, ...], face: Face) -> Json:
    """A replica's place in the ring follows from its id, so that it keeps its sessions when its ports change. Health is
    asked for at the HTTP port, whichever calls go to the other one."""
    found = [
        {
            "endpoint": {
                "address": _address(_ip(replica), replica.http_port if face == "http" else replica.grpc_port),
                "health_check_config": {"port_value": replica.http_port},
            },
            "metadata": {"filter_metadata": {"envoy.lb": {"hash_key": replica.id}}},
        }
        for replica in pool
    ]
    return {
        "@type": f"{_TYPES}.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": service,
        "endpoints": [{"lb_endpoints": found}] if found else [],
    }


def _ip(replica: Replica) -> str:
    try:
        return str(ipaddress.ip_address(replica.host))
    except ValueError:
        raise ConfigError(f"replica {replica.id}: {replica.host!r} is no address; give the IP of its machine") from None


def _faces(model: ModelConfig) -> list[Face]:
    ports = {"http": model.http_port, "grpc": model.grpc_port}
    return [face for face in FACES if ports[face] is not None]


def _service(model: str, release: str, face: Face) -> str:
    """Names may hold dots; a digest of both keeps one model's ``a.b`` apart from another's."""
    apart = hashlib.sha256(f"{model}\0{release}".encode()).hexdigest()[:6]
    return f"{model}.{release}.{apart}.{face}"


def _cluster_name(service: str, spread: Spread) -> str:
    return f"{service}.{spread}"


def _watched(path: Path) -> Json:
    return {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}


def _resources(resources: list[Json]) -> Json:
    return {"resources": resources}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _header(name: str, value: str, action: str = "OVERWRITE_IF_EXISTS_OR_ADD") -> Json:
    return {"header": {"key": name, "value": value}, "append_action": action}


def _file(path: Path) -> Json:
    return {"filename": str(path.expanduser().absolute())}


def _seconds(value: float) -> str:
    """As protobuf reads it, which knows no exponents."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def _write(path: Path, content: Mapping[str, Any]) -> bool:
    """Put ``content`` at ``path`` by one rename, so that Envoy never reads a half; False: it was there already."""
    data = json.dumps(content, indent=1).encode()
    try:
        if path.read_bytes() == data:
            return False
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(name, path)
    return True
