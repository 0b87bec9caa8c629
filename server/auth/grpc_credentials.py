"""Certificates as gRPC takes them."""

from __future__ import annotations

import grpc

from server.auth.tls_files import TlsFiles


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials whose certificate, and whose authorities of clients, are those of the files at each handshake."""

    def fetch() -> grpc.ServerCertificateConfiguration:
        found = files.current()
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], root_certificates=found.client_ca)

    return grpc.dynamic_ssl_server_credentials(fetch(), fetch, require_client_authentication=files.mutual)
