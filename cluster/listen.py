"""Whether clients can be listened for: certificates and ports are looked at before anything is started."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import psutil

from cluster.config import ClusterConfig, ListenConfig
from specdec.errors import ConfigError


def check_certificates(listen: ListenConfig) -> None:
    """Envoy names no field of ours when it can not read one.

    Raises:
        ConfigError: a file is missing, can not be read, or is not what it should be; names the field.
    """
    for field, path in (
        ("tls_cert", listen.tls_cert), ("tls_key", listen.tls_key), ("tls_client_ca", listen.tls_client_ca)
    ):  # fmt: skip
        if path is not None:
            _check_readable(f"listen.{field}", path)
    if listen.tls_cert is None or listen.tls_key is None:
        return
    cert, key = listen.tls_cert.expanduser(), listen.tls_key.expanduser()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # instead of asking on the terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"listen.tls_cert, listen.tls_key: {cert} and {key} are no certificate with its key ({error}); "
            "both must be PEM files, the key not encrypted"
        ) from None
    if listen.tls_client_ca is not None:
        try:
            context.load_verify_locations(listen.tls_client_ca.expanduser())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"listen.tls_client_ca: {listen.tls_client_ca} holds no PEM certificates ({error})"
            ) from None


def check_ports(config: ClusterConfig) -> None:
    """Envoy's own words for a port that is taken name no field; and two of them could even share one.

    Raises:
        ConfigError: a port or the address can not be had; names the field, and who has the port where that is known.
    """
    wanted = [("listen.admin_port", "127.0.0.1", config.listen.admin_port)]
    for model in config.models:
        for field, port in (("http_port", model.http_port), ("grpc_port", model.grpc_port)):
            wanted.append((f"{model.name}.{field}", config.listen.host, port or 0))
    for field, host, port in wanted:
        if port:
            _check_port(field, host, port)


def _check_port(field: str, host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As Envoy does: what closed connections left behind takes nobody's port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{field}: {host}:{port} can not be had ({error.strerror}){_holder(port)}; "
                f"give another {field.rpartition('.')[2]} or listen.host, or end who has it"
            ) from None


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr[1:] == (port,) and found.pid is not None:
                return f", process {found.pid} ({psutil.Process(found.pid).name()}) listens there"
    return ""


def _check_readable(field: str, path: Path) -> None:
    try:
        path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} can not be read ({error.strerror})") from None
