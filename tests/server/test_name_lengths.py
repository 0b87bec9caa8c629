"""Names that callers give are bounded, on both protocols."""

from __future__ import annotations

import grpc

from specdec.api.v1 import options_pb2
from specdec.core.fields import MAX_NAME, MAX_STOP_TEXT
from tests.server.harness import refused, stream_request
from tests.server.http.harness import running
from tests.server.secure_harness import secure_server

LONG = "n" * (MAX_NAME + 1)


def test_http() -> None:
    with running() as server:
        for name in ("session", "cache_salt", "supersedes_key"):
            status, error = server.refused(prompt="a", **{name: LONG})
            assert (status, error["param"]) == (400, name)
            assert f"at most {MAX_NAME} characters" in error["message"]
            assert server.ask(prompt="a", max_tokens=1, **{name: LONG[1:]})["choices"]
        for stop in ("s" * (MAX_STOP_TEXT + 1), ["a", "s" * (MAX_STOP_TEXT + 1)]):
            status, error = server.refused(prompt="a", stop=stop)
            assert (status, error["param"]) == (400, "stop")
            assert error["message"].endswith(f"at most {MAX_STOP_TEXT} characters each")
        assert server.ask(prompt="a", max_tokens=1, stop="s" * MAX_STOP_TEXT)["choices"]
        response = server.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-session-id": LONG})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "session")


async def test_grpc() -> None:
    async with secure_server() as server, server.stubs() as stubs:
        for field, request in (
            ("cache.salt", stream_request("a", salt=LONG)),
            ("session.id", stream_request("a", session=options_pb2.SessionOptions(id=LONG))),
            ("stopping.stop", stream_request("a", stopping=options_pb2.StoppingOptions(stop=["a", LONG]))),
            ("supersedes_key", stream_request("a", scheduling=options_pb2.SchedulingOptions(supersedes_key=LONG))),
        ):
            error = await refused(stubs.generation.GenerateStream(request))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert str(error.details()).startswith(f"{field}: at most {MAX_NAME} characters")
