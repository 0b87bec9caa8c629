"""How a client shows who it is, and knows the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Credentials:
    """``key``: sent with every call. ``tls``: encrypt; the server's certificate must be of ``ca`` (PEM file; None: the
    authorities gRPC comes with). ``cert`` and ``cert_key``: PEM files, shown to servers that ask for a certificate."""

    key: str = ""
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    cert_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.cert_key is None):
            raise ConfigError("credentials: cert and cert_key belong together: give both, or neither")
        if not self.tls and (self.ca or self.cert):
            raise ConfigError("credentials: ca and cert mean nothing without tls")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def channel(self) -> grpc.ChannelCredentials | None:
        """What a channel is opened with; None: in the clear.

        Raises:
            ConfigError: a file can not be read.
        """
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.cert_key), _read(self.cert))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"credentials: {path} can not be read ({error.strerror})") from None
