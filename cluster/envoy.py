"""Envoy's configuration files for a fleet.

The bootstrap holds the fixed part: listeners and the admin port. Endpoints, clusters and routes change with the fleet;
they are in files that Envoy watches and reloads when they are replaced, without a restart and without an effect on
running calls. Each model has one listener for HTTP and one for gRPC.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from cluster.config import BALANCE_PERCENT, RING_PLACES, ClusterConfig, Face, ModelConfig
from cluster.fleet import Fleet, Replica
from cluster.state_folder import replace_files
from server.body_budget import MAX_MESSAGE_BYTES
from server.hold_headers import HOLD_HEADER
from server.observe.records import NO_RETRY_HEADER

Json = dict[str, Any]
Spread = Literal["affine", "least"]
SPREADS: tuple[Spread, ...] = ("affine", "least")
RELEASE_HEADER = "x-specdec-release"

_TYPES = "type.googleapis.com/envoy"
_OFF = "0s"
# Replicas do admission; limits in Envoy would only refuse calls that a replica would accept.
_NO_LIMIT = 1 << 20
# Below the servers' 75 s, so that no call arrives on a connection that its server just closed.
_IDLE_S = 60.0  # of a connection to a replica
_HEADERS_S = 30.0  # for a client to send its headers
_CONNECT_S = 1.0  # to a replica; then another one is tried
_PROBE_S = 2.0  # a probe of /readyz that takes longer fails
_FAILED_PROBES = 2  # in a row, after which a replica gets no calls
_ERRORS_IN_A_ROW = 5  # 5xx answers, or broken connections over gRPC, that eject a replica
_EJECTED_S = 10.0  # the first ejection; each further one takes as much longer
_MOST_EJECTED_PERCENT = 50  # of a release's replicas at once


class EnvoyFiles:
    """The files of an Envoy, which has ``folder`` for itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bootstrap = folder / "bootstrap.json"  # read once, at the start
        self.clusters = folder / "clusters.json"  # the releases, and how calls are distributed within each
        self.certificate = folder / "certificate.json"  # names the listeners' certificate
        self.client_ca = folder / "client_ca.json"  # names the authorities of clients' certificates

    def routes(self, model: str, face: Face) -> Path:
        """Which release a call of a listener goes to."""
        return self.folder / f"routes.{model}.{face}.json"

    def endpoints(self, model: str, release: str, face: Face) -> Path:
        """The replicas of a release."""
        return self.folder / f"endpoints.{_service(model, release, face)}.json"


def write_bootstrap(config: ClusterConfig, files: EnvoyFiles) -> None:
    """Writes what Envoy reads at its start. Its watched files are written first, so that they exist."""
    contents = {files.bootstrap: encoded(bootstrap(config, files))}
    cert, key, ca = config.listen.tls_cert, config.listen.tls_key, config.listen.tls_client_ca
    if cert is not None and key is not None:
        certificate = {"certificate_chain": _file(cert), "private_key": _file(key), **_watched_folder(cert)}
        contents[files.certificate] = encoded(_secret("certificate", {"tls_certificate": certificate}))
    if ca is not None:
        authorities = {"trusted_ca": _file(ca), **_watched_folder(ca)}
        contents[files.client_ca] = encoded(_secret("client_ca", {"validation_context": authorities}))
    replace_files(contents)


def fleet_files(config: ClusterConfig, fleet: Fleet, files: EnvoyFiles) -> dict[Path, bytes]:
    """The watched files and their contents, in the order of writing: targets before the routes to them."""
    found: dict[Path, Json] = {}
    clusters: list[Json] = []
    for model in config.models:
        for name, release in fleet.releases[model.name].items():
            for face in model.ports:
                service = _service(model.name, name, face)
                path = files.endpoints(model.name, name, face)
                found[path] = {"resources": [_endpoints(service, release.pool, face)]}
                clusters += [_cluster(config, service, face, spread, _watched(path)) for spread in SPREADS]
    found[files.clusters] = {"resources": clusters}
    for model in config.models:
        for face in model.ports:
            found[files.routes(model.name, face)] = {"resources": [_routes(config, fleet, model, face)]}
    return {path: encoded(content) for path, content in found.items()}


def encoded(content: Json) -> bytes:
    """The bytes of a file."""
    return json.dumps(content, indent=1).encode()


def bootstrap(config: ClusterConfig, files: EnvoyFiles) -> Json:
    """The admin port, on loopback only, and the listeners."""
    listeners = [_listener(config, model, face, files) for model in config.models for face in model.ports]
    return {
        "node": {"id": "specdec", "cluster": "specdec"},
        "admin": {"address": _address("127.0.0.1", config.listen.admin_port)},
        "static_resources": {"listeners": listeners},
        "dynamic_resources": {"cds_config": _watched(files.clusters)},
    }


def _listener(config: ClusterConfig, model: ModelConfig, face: Face, files: EnvoyFiles) -> Json:
    chain: Json = {"filters": [_connections(model, face, files)]}
    if config.listen.tls_cert is not None:
        chain["transport_socket"] = _downstream_tls(config, files)
    return {
        "name": f"{model.name}.{face}",
        "address": _address(config.listen.host, model.ports[face]),
        "filter_chains": [chain],
        "socket_options": _KEEP_ALIVE_OPTIONS,
        # With it, a second Envoy on this port would silently take half of the calls.
        "enable_reuse_port": False,
    }


# SO_KEEPALIVE, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT of Linux: detects a dead client machine within 45 s.
_KEEP_ALIVE_OPTIONS = [
    {"level": level, "name": name, "int_value": value, "state": "STATE_PREBIND"}
    for level, name, value in ((1, 9, 1), (6, 4, 30), (6, 5, 5), (6, 6, 3))
]


def _connections(model: ModelConfig, face: Face, files: EnvoyFiles) -> Json:
    """The HTTP connection manager of a listener. No timeout ends a slow stream, and headers pass unchanged."""
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
    """Envoy watches the certificate and the client authorities, and reloads them when they change."""
    common: Json = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [
            {"name": "certificate", "sds_config": _watched(files.certificate)},
        ],
    }
    if config.listen.tls_client_ca is not None:
        common["validation_context_sds_secret_config"] = {
            "name": "client_ca", "sds_config": _watched(files.client_ca),
        }  # fmt: skip
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": common,
            "require_client_certificate": config.listen.tls_client_ca is not None,
        },
    }


def _secret(name: str, content: Json) -> Json:
    secret = {"@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.Secret", "name": name, **content}
    return {"resources": [secret]}


def _watched_folder(path: Path) -> Json:
    return {"watched_directory": {"path": str(path.parent)}}


def _routes(config: ClusterConfig, fleet: Fleet, model: ModelConfig, face: Face) -> Json:
    """Calls with an affinity header are split between the releases by the hash of its value, which also selects the
    replica. Calls without one go to the live release, to the less busy of two replicas."""
    live = fleet.live(model.name)
    least: Json = {
        "cluster": f"{_service(model.name, live, face)}.least",
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
    answered_by = [_header(RELEASE_HEADER, live)]
    routes.append({"match": {"prefix": "/"}, "route": least, "response_headers_to_add": answered_by})
    return {
        "@type": f"{_TYPES}.config.route.v3.RouteConfiguration",
        "name": f"{model.name}.{face}",
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "include_request_attempt_count": True,
                "response_headers_to_remove": [NO_RETRY_HEADER],
                "request_headers_to_add": [_header(HOLD_HEADER, "1", "ADD_IF_ABSENT")],
                "request_body_buffer_limit": MAX_MESSAGE_BYTES,
                "routes": routes,
            }
        ],
    }


def _split(fleet: Fleet, model: ModelConfig, face: Face) -> list[Json]:
    """The shares in their order. Envoy takes XXH64 of the key modulo the sum of the weights, so a session's release can
    be computed offline."""
    return [
        {
            "name": f"{_service(model.name, release, face)}.affine",
            "weight": weight,
            "response_headers_to_add": [_header(RELEASE_HEADER, release)],
        }
        for release, weight in fleet.shares(model.name)
    ]


def _route_settings(config: ClusterConfig, face: Face) -> Json:
    """No timeouts. Envoy retries a call on another replica if it received no byte, or if the replica answered 503 or
    UNAVAILABLE, which says that it did not begin.

    Envoy does not retry an answer with the header x-envoy-ratelimited. A replica sets it if the request must not run
    anywhere else, and on the second death of an engine: x-envoy-attempt-count of the request counts the attempts."""
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
        # A dead replica has no running calls, so least-request selection prefers it until it is ejected.
        "host_selection_retry_max_attempts": 64,
    }
    return {"timeout": _OFF, "idle_timeout": _OFF, **({"retry_policy": retry} if config.routing.retries else {})}


def _cluster(config: ClusterConfig, service: str, face: Face, spread: Spread, watched: Json) -> Json:
    """The cluster of a release for one way of load balancing. A replica that leaves the endpoints gets no more calls
    and finishes its running ones."""
    interval = _seconds(config.health.interval_s)
    cluster: Json = {
        "@type": f"{_TYPES}.config.cluster.v3.Cluster",
        "name": f"{service}.{spread}",
        "type": "EDS",
        "eds_cluster_config": {"service_name": service, "eds_config": watched},
        "connect_timeout": _seconds(_CONNECT_S),
        "ignore_health_on_host_removal": True,
        # Do not merge updates: a change of a replica's health takes effect at once.
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
                "timeout": _seconds(_PROBE_S),
                "interval": interval,
                "no_traffic_interval": interval,
                "unhealthy_threshold": _FAILED_PROBES,
                "healthy_threshold": 1,
                "http_health_check": {"host": "localhost", "path": "/readyz", "codec_client_type": "HTTP1"},
            }
        ],
        "outlier_detection": _outlier_detection(face),
    }
    if spread == "least":
        return cluster | {"lb_policy": "LEAST_REQUEST"}
    cluster["common_lb_config"]["consistent_hashing_lb_config"] = {"hash_balance_factor": BALANCE_PERCENT}
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


def _outlier_detection(face: Face) -> Json:
    """Ejects a replica after consecutive errors. Over gRPC only broken connections count: Envoy cannot distinguish a
    replica's failures from errors that calls cause themselves, such as unattainable deadlines, which come in rows under
    load."""
    by_answers, by_connections = (100, 0) if face == "http" else (0, 100)
    return {
        "consecutive_5xx": _ERRORS_IN_A_ROW,
        "enforcing_consecutive_5xx": by_answers,
        "split_external_local_origin_errors": face == "grpc",
        "consecutive_local_origin_failure": _ERRORS_IN_A_ROW,
        "enforcing_consecutive_local_origin_failure": by_connections,
        "interval": _seconds(1.0),
        "base_ejection_time": _seconds(_EJECTED_S),
        "max_ejection_percent": _MOST_EJECTED_PERCENT,
        # A replica that fails calls usually answers /readyz, and its ejection would end with the next probe.
        "successful_active_health_check_uneject_host": False,
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
    }


def _endpoints(service: str, pool: tuple[Replica, ...], face: Face) -> Json:
    """The hash key is the replica's id, so a replacement with other ports keeps the sessions. Probes of gRPC endpoints
    go to the HTTP port."""
    found = [
        {
            "endpoint": {
                "address": _address(replica.host, replica.http_port if face == "http" else replica.grpc_port),
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


def _service(model: str, release: str, face: Face) -> str:
    """Names may contain dots, so a digest of both makes the name unique."""
    apart = hashlib.sha256(f"{model}\0{release}".encode()).hexdigest()[:6]
    return f"{model}.{release}.{apart}.{face}"


def _watched(path: Path) -> Json:
    return {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _header(name: str, value: str, action: str = "OVERWRITE_IF_EXISTS_OR_ADD") -> Json:
    return {"header": {"key": name, "value": value}, "append_action": action}


def _file(path: Path) -> Json:
    return {"filename": str(path)}


def _seconds(value: float) -> str:
    """In protobuf's JSON form, which has no exponents."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"
