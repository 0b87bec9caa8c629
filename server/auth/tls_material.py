"""What a TLS server shows and asks for."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """PEM bytes of the certificate chain, its key, and the authorities of clients (None: no client certificate is
    asked for). ``context`` holds the same for Python's own sockets."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
