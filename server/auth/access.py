"""Who may call a server, and over what: keys from headers, TLS certificates from files, open paths."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from server.auth.browsers import BrowserRules
from server.auth.file_watch import FileWatch
from server.auth.keys import KeyRing
from server.auth.principal import ANYBODY, Principal
from server.errors import UnauthenticatedError
from specdec.config import ServerConfig
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """PEM bytes of the certificate chain, its key, and the authorities of clients (None: no client certificate is
    asked for). ``context`` holds the same for Python's own sockets."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class TlsFiles:
    """Certificate chain, key and, for mutual TLS, authorities of clients. A new connection gets what the files hold
    then; files that do not fit each other leave what is in force, and are logged. Safe to use from several threads.

    Raises:
        ConfigError: they can not be read or used to begin with.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None, watch: FileWatch | None = None) -> None:
        self._cert, self._key = cert.expanduser(), key.expanduser()
        self._client_ca = None if client_ca is None else client_ca.expanduser()
        paths = [self._cert, self._key, *([self._client_ca] if self._client_ca else [])]
        self._watch = watch or FileWatch(paths)
        self._lock = threading.Lock()
        self._current = self._read()

    @property
    def mutual(self) -> bool:
        """Whether clients must show a certificate."""
        return self._client_ca is not None

    def current(self) -> TlsMaterial:
        """What the files hold now, or held when they were last sound."""
        with self._lock:
            if self._watch.changed():
                try:
                    self._current = self._read()
                    _LOG.info("%s: the new certificate is in force", self._cert)
                except ConfigError as error:
                    _LOG.error("%s; the certificate stays as it was", error)
            return self._current

    def server_context(self) -> ssl.SSLContext:
        """A context for a server of this process (uvicorn, asyncio); each handshake uses what the files hold then."""
        context = self._context()

        def newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.current().context

        # Called at every client hello, whether it names a server or not.
        context.sni_callback = newest
        return context

    def _read(self) -> TlsMaterial:
        context = self._context()
        ca = None if self._client_ca is None else _bytes(self._client_ca, "server.tls_client_ca")
        cert, key = _bytes(self._cert, "server.tls_cert"), _bytes(self._key, "server.tls_key")
        return TlsMaterial(cert, key, ca, context)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # An encrypted key is refused like any other that can not be read, instead of asking on the terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"server.tls_cert, server.tls_key: {self._cert} and {self._key} are no certificate with its key "
                f"({error}); both must be PEM files, the key not encrypted"
            ) from None
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"server.tls_client_ca: {self._client_ca} holds no PEM certificates ({error})"
                ) from None
        return context


def _bytes(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} can not be read ({error.strerror})") from None


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials whose certificate, and whose authorities of clients, are those of the files at each handshake."""

    def fetch() -> grpc.ServerCertificateConfiguration:
        found = files.current()
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], root_certificates=found.client_ca)

    return grpc.dynamic_ssl_server_credentials(fetch(), fetch, require_client_authentication=files.mutual)


_SCHEME = "bearer "


class Access:
    """Keys and certificates of one server, shared by its protocols.

    Raises:
        ConfigError: a file can not be read or used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.open_health, self.open_metrics = config.open_health, config.open_metrics
        self.browsers = BrowserRules(config)
        self._keys = None if config.keys_file is None else KeyRing(config.keys_file)
        self._tls: TlsFiles | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self._tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)

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


KEY_HEADERS = ("authorization", "x-api-key")
# Asked by probes, which have no key. Not Tabby's /v1/health: its agent learns there that its key is wrong.
HEALTH_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/version"})
METRICS_PATH = "/metrics"
# A browser asks for the page before anybody can give it a key; what the page then asks needs one.
PLAYGROUND_PATHS = frozenset({"/", "/page/{name}"})


async def http_caller(access: Access, path: str, headers: Mapping[str, str]) -> Principal:
    """Who sent a request for ``path`` with ``headers``, whose names are lower-case or found in any case.

    Editors and SDKs send ``Authorization: Bearer KEY``; some send ``x-api-key: KEY`` too, or only that.

    Raises:
        UnauthenticatedError: a key is needed and there is none, or it is not known; 401 with ``WWW-Authenticate``.
        KeyChecksBusyError: too many keys are being checked; 429.
    """
    if path in PLAYGROUND_PATHS:
        return ANYBODY
    if (access.open_health and path in HEALTH_PATHS) or (access.open_metrics and path == METRICS_PATH):
        return ANYBODY
    authorization, api_key = (headers.get(name) for name in KEY_HEADERS)
    return await access.caller(authorization, api_key)
