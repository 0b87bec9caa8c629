"""Certificates from files, read again when these change."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from server.auth.file_watch import FileWatch
from server.auth.tls_material import TlsMaterial
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)


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
