"""TLS of the HTTP and gRPC ports: what a handshake presents and requires, before and after the files change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from starlette.types import Receive, Scope, Send

from server.auth.access import TlsFiles, grpc_credentials
from server.auth.file_watch import FileWatch
from server.http.http_server import HttpServer
from specdec.errors import ConfigError
from tests.server.auth.certificates import Certificates


def watched(cert: Path, key: Path, ca: Path | None = None) -> TlsFiles:
    """Files that are looked at in every handshake."""
    return TlsFiles(cert, key, ca, FileWatch([cert, key, *([ca] if ca else [])], every_s=0))


ASK = b"GET / HTTP/1.1\r\nhost: localhost\r\n"


@asynccontextmanager
async def listening(files: TlsFiles) -> AsyncIterator[int]:
    """Run an HTTP server that answers hello; yields its port."""

    async def hello(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    server = HttpServer(hello, "127.0.0.1", 0, files)
    try:
        yield await server.start()
    finally:
        await server.stop()


async def greeting(port: int, context: ssl.SSLContext, name: str = "localhost") -> str:
    """Return what the server answers, or the error of the handshake."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        writer.write(ASK + b"connection: close\r\n\r\n")
        data = await reader.read()
        writer.close()
    except (ssl.SSLError, ConnectionError) as error:
        return type(error).__name__
    return data.decode().rpartition("\r\n\r\n")[2] or "nothing"


async def test_a_new_certificate_is_used_from_the_next_connection(tmp_path: Path) -> None:
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    async with listening(watched(old.cert, old.key)) as port:
        assert await greeting(port, old.client_context()) == "hello"
        assert await greeting(port, new.client_context()) != "hello"
        new.install(old.cert, old.key)
        assert await greeting(port, new.client_context()) == "hello"
        assert await greeting(port, new.client_context(), "127.0.0.1") == "hello"  # no name is sent with an address
        assert await greeting(port, old.client_context()) == "SSLCertVerificationError"


async def test_connections_stay_open_while_certificate_and_authority_change(tmp_path: Path) -> None:
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    trusts = {"old": old.client_context(shows=True), "new": new.client_context(shows=True)}
    async with listening(watched(old.cert, old.key, old.ca)) as port:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusts["old"], server_hostname="localhost"
        )
        for _ in range(3):
            writer.write(ASK + b"\r\n")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            new.install(old.cert, old.key, old.ca)
            assert await greeting(port, trusts["new"]) == "hello"
        writer.close()


async def test_clients_of_the_current_authority_are_accepted(tmp_path: Path) -> None:
    server, old, new = (Certificates(tmp_path / name) for name in ("server", "old", "new"))
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(old.ca_pem)

    def client(shown: Certificates | None) -> ssl.SSLContext:
        context = server.client_context()
        if shown is not None:
            context.load_cert_chain(shown.client)
        return context

    async with listening(watched(server.cert, server.key, authorities)) as port:
        for shown, welcome in ((old, True), (new, False), (None, False)):
            assert (await greeting(port, client(shown)) == "hello") == welcome
        authorities.write_bytes(new.ca_pem)
        for shown, welcome in ((new, True), (old, False), (None, False)):
            assert (await greeting(port, client(shown)) == "hello") == welcome


@asynccontextmanager
async def grpc_port(files: TlsFiles) -> AsyncIterator[int]:
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc_credentials(files))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def visit(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
    """Connect and send a request. Returns the session to resume later, and whether ``session`` was resumed.

    Raises: ssl.SSLError: the server rejects the client's certificate.
    """
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as tls,
    ):
        tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        if not tls.recv(1):  # TLS 1.3 rejects a certificate after the handshake, with the first bytes
            raise ssl.SSLError("closed")
        return tls.session, bool(tls.session_reused)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_bug_a_session_ends_with_the_authority_that_accepted_it(
    tmp_path: Path, protocol: str, version: ssl.TLSVersion
) -> None:
    server, old, new = (Certificates(tmp_path / name) for name in ("server", "old", "new"))
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(old.ca_pem)
    context = server.client_context()
    context.load_cert_chain(old.client)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    serve = listening if protocol == "http" else grpc_port
    async with serve(watched(server.cert, server.key, authorities)) as port:
        session, _ = await asyncio.to_thread(visit, port, context, None)
        assert session is not None
        authorities.write_bytes(new.ca_pem)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(visit, port, context, session)
        authorities.write_bytes(old.ca_pem)
        await asyncio.to_thread(visit, port, context, None)


async def test_an_inconsistent_pair_of_files_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    files = watched(old.cert, old.key)
    before = files.current()
    async with listening(files) as port:
        old.cert.write_bytes(new.cert.read_bytes())  # the key follows a moment later
        assert await greeting(port, old.client_context()) == "hello"
        assert files.current() == before
        assert "not a certificate and its key" in caplog.text
        old.key.write_bytes(new.key.read_bytes())
        assert await greeting(port, new.client_context()) == "hello"
    found = files.current()
    assert (found.cert, found.key) == (new.cert.read_bytes(), new.key.read_bytes())


def test_unusable_files_are_rejected_at_the_start(tmp_path: Path) -> None:
    made, other = Certificates(tmp_path / "a"), Certificates(tmp_path / "b")
    text = tmp_path / "text.pem"
    text.write_text("nothing")
    locked = tmp_path / "locked.pem"
    locked.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIGbMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAc"
        "\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    for cert, key in ((made.cert, other.key), (text, made.key), (made.cert, locked)):
        with pytest.raises(ConfigError, match=r"server\.tls_cert, server\.tls_key"):
            TlsFiles(cert, key)
    for field, cert, key in (("cert", tmp_path / "none", made.key), ("key", made.cert, tmp_path / "none")):
        with pytest.raises(ConfigError, match=rf"^server\.tls_{field}: .*none cannot be read \(No such file"):
            TlsFiles(cert, key)
    for ca in (text, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"server\.tls_client_ca"):
            TlsFiles(made.cert, made.key, ca)
