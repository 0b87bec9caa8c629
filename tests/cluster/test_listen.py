"""Certificates and ports that can not be had are named before anything is started."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster.config import ClusterConfig, ListenConfig
from cluster.listen import check_certificates, check_ports
from specdec.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A certificate, its key and an authority."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    found = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key", "tls_client_ca": tmp_path / "ca"}
    own.cert_chain_pems[0].write_to_path(found["tls_cert"])
    own.private_key_pem.write_to_path(found["tls_key"])
    authority.cert_pem.write_to_path(found["tls_client_ca"])
    return found


def test_sound_files_are_taken_and_none_too(files: dict[str, Path]) -> None:
    check_certificates(ListenConfig(**files))
    check_certificates(ListenConfig())


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_client_ca"])
def test_a_file_that_is_missing_or_something_else_is_named(files: dict[str, Path], field: str) -> None:
    files[field].write_text("no PEM")
    with pytest.raises(ConfigError, match=rf"listen\.{field}.*PEM"):
        check_certificates(ListenConfig(**files))
    files[field].unlink()
    with pytest.raises(ConfigError, match=rf"^listen\.{field}: {files[field]} can not be read \(No such file"):
        check_certificates(ListenConfig(**files))


def config(port: int, **listen: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"models": [{"name": "coder", "http_port": port, "grpc_port": None}], "listen": {"admin_port": 0, **listen}}
    )


def test_a_port_that_another_listens_at_is_named_even_where_it_would_be_shared() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"coder\.http_port: 127\.0\.0\.1:{port} .*process {os.getpid()} "):
            check_ports(config(port))
        with pytest.raises(ConfigError, match=rf"listen\.admin_port: 127\.0\.0\.1:{port} .*give another admin_port"):
            check_ports(config(1 if port != 1 else 2, admin_port=port))
    check_ports(config(port))


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"coder\.http_port: 192\.0\.2\.1:8401 can not be had .*listen\.host"):
        check_ports(config(8401, host="192.0.2.1"))
