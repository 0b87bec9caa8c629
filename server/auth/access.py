"""Access to a server: keys in headers, TLS certificates from files, paths that need no key."""

from __future__ import annotations

import ipaddress
import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from server.auth.file_watch import FileWatch
from server.auth.keys import KeyRing
from server.auth.principal import ANYBODY, Principal
from server.errors import TLS_FILES, CrossSiteError, FileErrors, HostNotAllowedError, UnauthenticatedError
from specdec.config import ServerConfig
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    cert: bytes  # certificate chain, PEM
    key: bytes  # private key, PEM
    client_ca: bytes | None  # authorities of client certificates, PEM; None: clients need no certificate
    context: ssl.SSLContext  # the same files for Python's own sockets


class TlsFiles:
    """Certificate chain, key and, for mutual TLS, client authorities. A new connection uses the current files; if they
    do not match each other, the previous ones stay in force and an error is logged. Thread-safe.

    Raises:
        ConfigError: the files cannot be read or used at start.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        client_ca: Path | None = None,
        watch: FileWatch | None = None,
        file_errors: FileErrors | None = None,
    ) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        paths = [self._cert, self._key, *([self._client_ca] if self._client_ca else [])]
        self._watch = watch or FileWatch(paths)
        self._errors: FileErrors = Counter() if file_errors is None else file_errors
        self._lock = threading.Lock()
        self._current = self._read()

    def current(self) -> TlsMaterial:
        """The content of the files, as of their last valid state."""
        with self._lock:
            if self._watch.changed():
                try:
                    self._current = self._read()
                    _LOG.info("%s: loaded the new certificate", self._cert)
                except ConfigError as error:
                    self._errors[TLS_FILES] += 1
                    _LOG.error("%s; keeping the previous certificate", error)
            return self._current

    def _read(self) -> TlsMaterial:
        # First: OpenSSL does not say which file cannot be read.
        cert, key = _bytes(self._cert, "server.tls_cert"), _bytes(self._key, "server.tls_key")
        ca = None if self._client_ca is None else _bytes(self._client_ca, "server.tls_client_ca")
        return TlsMaterial(cert, key, ca, self._context())

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # The empty password makes an encrypted key an error; without it OpenSSL prompts on the terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"server.tls_cert, server.tls_key: {self._cert} and {self._key} are not a certificate and its "
                f"key ({error}); both must be PEM files, the key unencrypted"
            ) from None
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"server.tls_client_ca: {self._client_ca} contains no PEM certificates ({error})"
                ) from None
        return context


def _bytes(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror})") from None


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials whose certificate and client authorities are read from the files at each handshake."""

    def fetch() -> grpc.ServerCertificateConfiguration:
        found = files.current()
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], root_certificates=found.client_ca)

    mutual = files.current().client_ca is not None
    return grpc.dynamic_ssl_server_credentials(fetch(), fetch, require_client_authentication=mutual)


# Suffixes that cannot be registered: no public site can use them.
_LOCAL_SUFFIXES = (".localhost", ".localdomain", ".local", ".internal", ".lan", ".home.arpa")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class BrowserRules:
    """Rejects calls that a browser sends on behalf of a foreign web site. Programs are unaffected: they send no
    ``Origin``, and the configured host.

    A site can make a browser call an address of this machine. Two cases need an answer on a server without keys: a call
    that browsers send across origins without a preflight, and a host name of the site that resolves to this machine
    (DNS rebinding), so that the browser treats the call as same-origin.
    """

    def __init__(self, config: ServerConfig) -> None:
        hosts = config.allowed_hosts
        # A foreign site has no key. The names of a server that other machines reach are unknown here.
        self._any_host = "*" in hosts or not (hosts or (config.on_loopback and config.keys_file is None))
        self._names = {*hosts, config.host.lower()}
        self._suffixes = (*_LOCAL_SUFFIXES, *(host[1:] for host in hosts if host.startswith("*.")))
        self._origins = frozenset(config.cors_origins)

    def check(self, method: str, header: Callable[[str], str]) -> None:
        """``header`` returns a header by its lower-case name, empty if absent.

        Raises:
            HostNotAllowedError: the ``Host`` header is not a name of this server.
            CrossSiteError: another origin sent the call without a preflight.
        """
        host = header("host")
        if host and not self._any_host and not self._is_ours(_name(host)):
            raise HostNotAllowedError(
                f"host {host[:200]!r} is not known to be this server's; use localhost or its address, or name the host "
                "in server.allowed_hosts"
            )
        if method in _READING or _is_json(header("content-type")):
            return  # harmless for a foreign site, or browsers send a preflight, which CORS answers
        origin, site = header("origin"), header("sec-fetch-site")
        if "*" in self._origins or origin in self._origins:
            return
        foreign = origin != "" and origin.partition("://")[2].lower() != host.lower()
        if foreign or site in ("cross-site", "same-site"):
            raise CrossSiteError(
                f"a page of another origin ({origin[:200] or 'unknown'}) sent this; send content-type: "
                "application/json, and name the page's origin in server.cors_origins"
            )

    def _is_ours(self, name: str) -> bool:
        if name in self._names or "." not in name or name.endswith(self._suffixes):
            return True
        return _is_address(name)  # rebinding needs a name


def _name(host: str) -> str:
    """The host of a ``Host`` header, in lower case, without port and brackets."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


_SCHEME = "bearer "
# Probes send no key. Tabby's /v1/health is not among them: its agent uses it to test its key.
HEALTH_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/version"})
METRICS_PATH = "/metrics"
# A browser loads the playground before its user can enter a key. The playground's own calls send the key.
PLAYGROUND_PATHS = frozenset({"/", "/docs", "/page/{name}"})
_OPEN_PATHS = HEALTH_PATHS | PLAYGROUND_PATHS


class Access:
    """The keys and certificates of one server, shared by its protocols. file_errors: counts rejected versions of the
    files.

    Raises:
        ConfigError: a file cannot be read or used.
    """

    def __init__(self, config: ServerConfig, file_errors: FileErrors | None = None) -> None:
        self._open_paths = _OPEN_PATHS | {METRICS_PATH} if config.open_metrics else _OPEN_PATHS
        self.browsers = BrowserRules(config)
        self._keys = None if config.keys_file is None else KeyRing(config.keys_file, file_errors=file_errors)
        self.tls: TlsFiles | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self.tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca, file_errors=file_errors)

    async def http_caller(self, path: str, header: Callable[[str], str]) -> Principal:
        """The principal of an HTTP request for ``path``. header: as in `BrowserRules.check`.

        Raises:
            UnauthenticatedError: a key is required and missing or unknown; 401 with ``WWW-Authenticate``.
        """
        return ANYBODY if path in self._open_paths else await self._caller(header)

    async def grpc_caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Principal:
        """The principal of a gRPC call with ``metadata``; raises as `http_caller`."""
        texts = {name: value for name, value in metadata or () if isinstance(value, str)}
        return await self._caller(lambda name: texts.get(name, ""))

    async def _caller(self, header: Callable[[str], str]) -> Principal:
        """The principal of the key in a call's headers. Editors and SDKs send ``Bearer KEY`` in ``authorization``; some
        send the bare key in ``x-api-key`` too, or only that."""
        if self._keys is None:
            return ANYBODY
        authorization, key = header("authorization"), header("x-api-key")
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            key = authorization[len(_SCHEME) :].strip()
        if not key:
            raise UnauthenticatedError(
                "a key is required; send it as `authorization: Bearer KEY` (specdec commands: --key-file)"
            )
        return await self._keys.find(key)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Open ``address`` on ``server``, with TLS if configured, and return the port.

        Raises:
            RuntimeError: it cannot be opened.
        """
        if self.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, grpc_credentials(self.tls))
