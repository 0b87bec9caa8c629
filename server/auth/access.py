"""Who may call a server, and over what."""

from __future__ import annotations

import ssl

import grpc

from server.auth.auth_errors import UnauthenticatedError
from server.auth.grpc_credentials import grpc_credentials
from server.auth.key_ring import KeyRing
from server.auth.principal import ANYBODY, Principal
from server.auth.tls_files import TlsFiles
from specdec.config import ServerConfig

_SCHEME = "bearer "


class Access:
    """Keys and certificates of one server, shared by its faces.

    Raises:
        ConfigError: a file can not be read or used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.open_health, self.open_reflection = config.open_health, config.open_reflection
        self.open_metrics = config.open_metrics
        self._keys = None if config.keys_file is None else KeyRing(config.keys_file)
        self._tls: TlsFiles | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self._tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)

    @property
    def needs_key(self) -> bool:
        """Whether callers must show a key."""
        return self._keys is not None

    @property
    def uses_tls(self) -> bool:
        """Whether the ports speak TLS."""
        return self._tls is not None

    async def caller(self, authorization: str | None, api_key: str | None = None) -> Principal:
        """Who makes a call with these headers: ``Bearer KEY`` in one, or the bare key in the other.

        Raises:
            UnauthenticatedError: a key is needed and there is none, or it is not known.
            KeyChecksBusyError: too many keys are being checked.
        """
        if self._keys is None:
            return ANYBODY
        key = api_key or ""
        if authorization is not None and authorization[: len(_SCHEME)].lower() == _SCHEME:
            key = authorization[len(_SCHEME) :].strip()
        if not key:
            raise UnauthenticatedError("a key is needed; send it as `authorization: Bearer KEY`")
        return await self._keys.find(key)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Open a port of ``server`` at ``address``, with TLS where it is configured; returns the port, 0 for none."""
        try:
            if self._tls is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, grpc_credentials(self._tls))
        except RuntimeError:
            return 0

    def ssl_context(self) -> ssl.SSLContext | None:
        """For servers of Python's own sockets: certificates are read again when they change. None: no TLS."""
        return None if self._tls is None else self._tls.server_context()
