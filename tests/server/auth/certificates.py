"""Certificates for tests, in files."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Certificates:
    """An authority with a server's certificate for this machine and a client's, and files of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._authority = folder, trustme.CA()
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.ca, self.client = folder / "ca.pem", folder / "client.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        issued = self._authority.issue_cert("localhost", "127.0.0.1", "::1")
        issued.private_key_pem.write_to_path(self.key)
        issued.cert_chain_pems[0].write_to_path(self.cert)
        self._authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(self.client)

    @property
    def ca_pem(self) -> bytes:
        """The authority's certificate."""
        return self.ca.read_bytes()

    def install(self, cert: Path, key: Path, ca: Path | None = None) -> None:
        """Put these in the place of others."""
        cert.write_bytes(self.cert.read_bytes())
        key.write_bytes(self.key.read_bytes())
        if ca is not None:
            ca.write_bytes(self.ca_pem)

    def client_context(self, *, shows: bool = False) -> ssl.SSLContext:
        """A client's context that trusts this authority; ``shows`` a certificate of its own."""
        context = ssl.create_default_context(cafile=self.ca)
        if shows:
            context.load_cert_chain(self.client)
        return context
