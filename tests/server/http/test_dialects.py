"""Dialects that share a path, and the form of an endpoint's errors."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from server.http.app import build_app
from server.http.call import Call, Endpoint, ErrorStyle
from server.http.openai_format import OPENAI_ERRORS
from tests.server.http.calls import make_context

ONE_WORD = ErrorStyle(lambda refusal: refusal.reason, str.encode)


def endpoint(name: str, method: str = "POST", **more: Any) -> Endpoint:
    async def answer(call: Call) -> None:
        if call.data.get("fail"):
            await call.start_stream(b"text/plain")
            raise RuntimeError("a secret")
        await call.reply(200, {"by": name, "body": call.data if method == "POST" else None})

    return Endpoint(method, "/x", answer, ONE_WORD if name == "first" else OPENAI_ERRORS, name, **more)


ENDPOINTS = [
    endpoint("first", claims=lambda body: "segments" in body),
    endpoint("second", claims=lambda body: body.get("prompt") == 2),
    endpoint("rest"),
]


def test_the_first_dialect_that_claims_a_body_answers_it() -> None:
    with TestClient(build_app(make_context(), ENDPOINTS)) as client:
        for body, name in (
            ({"segments": {}}, "first"), ({"segments": 1, "prompt": 2}, "first"), ({"prompt": 2}, "second"),
            ({"prompt": 3}, "rest"), ({}, "rest"),
        ):  # fmt: skip
            assert client.post("/x", json=body).json() == {"by": name, "body": body}
        response = client.post("/x", content=b"{")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "body")
        assert client.get("/x").status_code == 405
        assert client.get("/openapi.json").json()["paths"]["/x"]["post"]["summary"] == "rest"


def test_each_dialect_has_its_own_errors() -> None:
    with TestClient(build_app(make_context(), ENDPOINTS)) as client:
        assert client.post("/x", json={"segments": 1, "fail": 1}).text == "INTERNAL"
        text = client.post("/x", json={"fail": 1}).text
        assert text.startswith('data: {"error"')
        assert "secret" not in text


def test_methods_of_one_path_may_belong_to_different_dialects() -> None:
    async def show(call: Call) -> None:
        await call.reply(200, {"by": "get"})

    both = [endpoint("post"), Endpoint("GET", "/x", show, OPENAI_ERRORS, "get")]
    with TestClient(build_app(make_context(), both)) as client:
        assert client.post("/x", json={}).json()["by"] == "post"
        assert client.get("/x").json()["by"] == "get"
        assert set(client.get("/openapi.json").json()["paths"]["/x"]) == {"post", "get"}
