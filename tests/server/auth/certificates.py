"""Certificates for tests, in files."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


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
        """A client's context that trusts this authority; ``shows`` its own certificate."""
        context = ssl.create_default_context(cafile=self.ca)
        if shows:
            context.load_cert_chain(self.client)
        return context


def write_self_signed(folder: Path, *, address: str | None = "127.0.0.1", days: int = 1) -> tuple[Path, Path]:
    """Files of a certificate for this machine that no authority stands for, as `openssl req -x509` makes it, and its
    key. address: that it names besides localhost; None: none. days: until it expires."""
    folder.mkdir(parents=True, exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    places: list[x509.GeneralName] = [x509.DNSName("localhost")]
    if address is not None:
        places.append(x509.IPAddress(ipaddress.ip_address(address)))
    made = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert, key
