"""The HTTP server itself: probes, connections, limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from server.http import call as call_module
from server.http import http_server
from server.http.call import Call
from server.http.errors import CallRefusedError, ClientGoneError, refusal_of
from server.http.http_server import HttpServer
from specdec.client.client import Client
from specdec.client.connection import CallError, RetryPolicy
from specdec.errors import ConfigError
from tests.server.harness import unread_bytes
from tests.server.http.calls import ignored, make_call, make_context, receiving
from tests.server.http.harness import COMPLETIONS, Server, events, running


def talk(server: Server, data: bytes, *, until: bytes | None = None) -> bytes:
    """Return what the server sends in reply to ``data``, up to ``until``, or until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while (until is None or until not in found) and (more := connection.recv(1 << 16)):
            found += more
        return found


def test_probes() -> None:
    with running(wait=False) as server:
        assert server.client.get("/livez").json()["status"] == "ok"
        response = server.client.get("/readyz")
        assert (response.status_code, response.json()["status"]) == (503, "not ready")
        server.run(server.serving.wait_ready())
        response = server.client.get("/readyz?x=1")
        assert (response.status_code, response.json()) == (200, {"status": "ready", "engine": "ready"})
        assert server.client.get("/version").json()["version"]
        assert server.client.post("/livez").status_code == 405
        assert (server.client.get("/ping").status_code, server.client.post("/ping").status_code) == (200, 200)
        response = server.client.head("/livez")
        assert (response.status_code, response.content) == (200, b"")
        assert "date" in response.headers


def test_a_target_may_be_a_whole_url() -> None:
    with running() as server:
        for target, status in (
            (b"http://any.host:80/livez?x=/", b"200"),
            (b"http://any.host/x", b"404"),
            (b"*", b"404"),
        ):
            answer = talk(server, b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % target)
            assert answer.startswith(b"HTTP/1.1 " + status), target


def test_a_call_has_one_id_also_if_it_gives_none_or_several() -> None:
    with running() as server:
        for given in ([""], ["", "mine"], ["mine", ""], ["mine", "another"]):
            headers = [("x-request-id", each) for each in given]
            answer = server.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers=headers)
            assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
            assert given[0] in ("", answer.headers["x-request-id"])


async def error_over_grpc(port: int) -> CallError:
    async with Client(f"127.0.0.1:{port}", retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(CallError) as caught:
            await client.info(10.0)
    return caught.value


def test_a_call_over_grpc_fails_at_once_and_names_the_other_port(server: Server) -> None:
    error = asyncio.run(error_over_grpc(server.port))
    assert (error.code.name, error.reached) == ("UNAVAILABLE", False)
    assert f"no specdec server answers at 127.0.0.1:{server.port}; " in str(error)
    assert "give the gRPC port of one that runs" in str(error)


@pytest.mark.parametrize("first", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_other_protocols_are_refused(server: Server, first: bytes) -> None:
    assert talk(server, first).startswith(b"HTTP/1.1 4")


def test_connections_are_kept_alive_and_non_http_is_rejected(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for _ in range(2):
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            found = b""
            while b'"engine"' not in found:
                found += connection.recv(1 << 16)
            assert found.startswith(b"HTTP/1.1 200")
        connection.sendall(b"\x00nonsense\r\n\r\n")
        found = b""
        while more := connection.recv(1 << 16):
            found += more
        assert found.startswith(b"HTTP/1.1 400")


def test_small_writes_are_not_delayed(server: Server) -> None:
    server.client.get("/livez")
    assert server.serving._http is not None
    (*_, connection) = server.serving._http._uvicorn.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


BODY = json.dumps({"prompt": "hello"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)


def test_bodies_arrive_whole_in_chunks_or_after_expect_continue(server: Server) -> None:
    end = b'"num_draft_tokens":0'
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n"
    for request in (HEAD + b"\r\n" + BODY, HEAD + upgrade + BODY):  # Java's client offers HTTP/2 first
        assert talk(server, request, until=end).startswith(b"HTTP/1.1 200")
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (BODY[:4], BODY[4:])) + b"0\r\n\r\n"
    assert talk(server, chunked + pieces, until=end).startswith(b"HTTP/1.1 200")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_pipelined_calls_are_answered_in_order(server: Server) -> None:
    received = talk(server, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 2 + HEAD + b"\r\n" + BODY, until=b'"idle"')
    assert received.count(b"HTTP/1.1 200") == 3


def test_a_too_large_body_is_413_with_and_without_a_length() -> None:
    with running(max_message_bytes=1 << 16) as server:
        big = {"prompt": "x" * (1 << 17)}
        for make in (lambda d: d, lambda d: iter([d[:1000], d[1000:]])):
            data: Any = make(json.dumps(big).encode())
            response = server.client.post(COMPLETIONS, content=data)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        response = server.client.post(COMPLETIONS, json={"prompt": "x" * (1 << 15)})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert server.ask(prompt="a")["choices"]


def test_endless_headers_are_rejected(server: Server) -> None:
    line = b"x-filler: " + b"y" * 1000 + b"\r\n"
    for request in (b"GET /" + b"y" * 70_000, b"GET /livez HTTP/1.1\r\n" + line * 80):
        assert talk(server, request).startswith(b"HTTP/1.1 400")
    assert talk(server, b"GET /livez HTTP/1.1\r\nhost: x\r\n" + line * 50 + b"\r\n", until=b"engine").startswith(
        b"HTTP/1.1 200"
    )


CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
SMUGGLED = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"content-length: 6\r\n" + CHUNKED,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + CHUNKED,
        POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY,
        POST + b"transfer-encoding: gzip, chunked\r\n\r\n",
        b"GET /livez HTTP/1.1\nhost: x\n\n",
        b"GET /livez HTTP/1.1\r\nhost: x\nx-a: b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: b\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: b\r\n\tc\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: b\rc: d\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a : b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: " + b"y" * (1 << 16) + b"\r\n\r\n",
    ],
)
def test_ambiguous_framing_is_rejected_and_closes_the_connection(server: Server, request_bytes: bytes) -> None:
    received = talk(server, request_bytes + SMUGGLED)
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1 ") == 1


def test_trailers_are_parsed_strictly(server: Server) -> None:
    trailed = POST + CHUNKED.removesuffix(b"\r\n")
    assert b"200 OK" in talk(server, trailed + b"x-a: b\r\n\r\n", until=b'"num_draft_tokens":0')
    assert b"200 OK" not in talk(server, trailed + b"x-a: b\n c\r\n\r\n")
    assert b"200 OK" not in talk(server, trailed + b"\n")


def test_incomplete_headers_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    with running() as server:
        assert talk(server, b"") == b""
        assert talk(server, b"GET /livez HTTP/1.1\r\nhost:") == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            for _ in range(2):  # between calls there is more time than that
                connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
                found = b""
                while b'"engine"' not in found:
                    found += connection.recv(1 << 16)
                time.sleep(0.4)
            connection.sendall(b"GET /li")  # but once it begins, it must come
            assert connection.recv(1) == b""


async def test_a_body_that_stalls_or_whose_client_disconnects_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "BODY_IDLE_S", 0.01)
    monkeypatch.setattr(call_module, "LINGER_S", 0.01)
    server = make_context(limit=10)
    piece = {"type": "http.request", "body": b"12345", "more_body": True}
    for messages, message, status in (([piece], "within 0.01 s", 408), ([piece] * 3, "exceeds 10 bytes", 413)):
        call = Call({"headers": [], "query_string": b""}, receiving(*messages), ignored, server)
        with pytest.raises(CallRefusedError, match=message) as refused:
            await call.read()
        refusal = refusal_of(refused.value, {})
        assert (refusal.status, refusal.headers) == (status, ((b"connection", b"close"),))
    for pieces in ([piece], [piece] * 3):
        left = receiving(*pieces, {"type": "http.disconnect"})
        with pytest.raises(ClientGoneError):
            await Call({"headers": [], "query_string": b""}, left, ignored, server).read()
    fits = Call({"headers": []}, receiving(piece, piece | {"more_body": False}), ignored, server)
    await fits.read()
    assert (await _gone(fits)) is False


async def _gone(call: Call) -> bool:
    try:
        await asyncio.wait_for(call.gone(), 0.01)
    except TimeoutError:
        return False
    return True


def test_headers_are_found_in_any_order() -> None:
    call = make_call(b"{}", {"x-session-id": "s", "x-other": "o"})
    assert (call.header("x-session-id"), call.header("x-other"), call.header("nothing")) == ("s", "o", "")


def test_shutdown_waits_for_no_idle_or_stalled_connection() -> None:
    with running() as server:
        idle = socket.create_connection(("127.0.0.1", server.port))
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(HEAD + b"\r\n{")
        server.client.get("/livez")
        began = time.monotonic()
        server.run(server.serving.stop())
        assert time.monotonic() - began < 5
        idle.settimeout(5)
        half.settimeout(5)
        assert idle.recv(1) == b""  # closed in order
        with contextlib.suppress(ConnectionResetError):
            assert half.recv(1) == b""
        idle.close()
        half.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/livez")


def test_a_reader_may_pause_and_one_that_stalls_delays_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def listen(host: str, port: int) -> list[socket.socket]:
        found = await http_server_listen(host, port)
        for listener in found:  # its connections inherit the size
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return found

    http_server_listen = http_server.listen
    monkeypatch.setattr(http_server, "listen", listen)
    asked: dict[str, Any] = {"prompt": ["abc" * 20] * 4, "n": 16, "stream": True, "max_tokens": 60}
    body = json.dumps(asked).encode()
    call = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with running() as server:
        client = server.serving.client

        def stalled() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connection.sendall(call)
            assert server.comes_to(lambda: client.in_flight == 0 and unread_bytes(client) > 0)
            time.sleep(0.3)
            assert unread_bytes(client) > 1 << 16  # waits in the streams, whose bound counts it, not in the socket
            return connection

        with stalled() as connection:
            response = HTTPResponse(connection)
            response.begin()
            found = texts_of(events(response.read()))
        assert found == texts_of(server.stream(**asked))
        with stalled():
            pass
        assert server.comes_to(lambda: unread_bytes(client) == 0)
        with stalled():
            began = time.monotonic()
            server.run(server.serving.stop())
            assert time.monotonic() - began < 5
        assert unread_bytes(client) == 0


def texts_of(chunks: list[Any]) -> list[str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks[:-1] for choice in chunk["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


async def test_a_port_in_use_or_a_foreign_address_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, number in (("127.0.0.1", port), ("192.0.2.1", 0), ("no such host", 0)):
            server = HttpServer(lambda *_: None, host, number)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=f"HTTP cannot listen on {host}:{number}: "):
                await server.start()
            await server.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", ""])
async def test_every_address_of_a_host_is_served_on_one_port(host: str) -> None:
    server = HttpServer(lambda *_: None, host, 0)  # type: ignore[arg-type]
    try:
        port = await server.start()
    except ConfigError as error:
        pytest.skip(str(error))  # a machine without IPv6
    ports = {listener.getsockname()[1] for one in server._uvicorn.servers for listener in one.sockets}
    await server.stop()
    assert ports == {port}


async def test_signal_handlers_stay_unchanged() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = HttpServer(lambda *_: None, "127.0.0.1", 0)  # type: ignore[arg-type]
    await server.start()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    await server.stop()
