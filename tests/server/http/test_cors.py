"""Pages of other origins may call the server only if the configuration names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.http.app import ENDPOINTS
from specdec.config import load_config
from specdec.errors import ConfigError
from tests.server.auth.key_files import make_key
from tests.server.http.harness import COMPLETIONS, Server, running

OURS, OTHER = "https://ours.example", "https://other.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
BODY = {"prompt": "ab", "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server that requires keys and allows one origin; and a key."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    key = make_key(path, "page")
    with running(keys_file=path, cors_origins=(OURS,)) as server:
        yield server, key


def preflight(server: Server, origin: str, **headers: str) -> httpx.Response:
    return server.client.options(COMPLETIONS, headers={"origin": origin, **ASKS, **headers})


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


def test_by_default_no_origin_is_allowed() -> None:
    with running() as server:
        assert server.serving._config.server.cors_origins == ()
        preflighted = preflight(server, OURS)
        assert preflighted.status_code == 405
        answered = server.client.post(COMPLETIONS, json=BODY, headers={"origin": OURS})
        assert answered.status_code == 200
        assert not [name for r in (preflighted, answered) for name in r.headers if name.startswith("access-control")]


def test_a_preflight_needs_no_key(keyed: tuple[Server, str]) -> None:
    server, _ = keyed
    response = preflight(server, OURS)
    assert (response.status_code, allowed(response)) == (200, OURS)
    assert response.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    methods = response.headers["access-control-allow-methods"].split(", ")
    assert {endpoint.method for endpoint in ENDPOINTS} <= {*methods}
    assert "access-control-allow-credentials" not in response.headers


def test_the_call_after_a_preflight_has_cors_headers(keyed: tuple[Server, str]) -> None:
    server, key = keyed
    refused = server.client.post(COMPLETIONS, json=BODY, headers={"origin": OURS})
    assert (refused.status_code, allowed(refused)) == (401, OURS)  # a script may read why
    answer = server.client.post(COMPLETIONS, json=BODY, headers={"origin": OURS, "authorization": f"Bearer {key}"})
    assert (answer.status_code, allowed(answer)) == (200, OURS)
    shown = answer.headers["access-control-expose-headers"]
    assert {"x-request-id", "request-id", "x-should-retry", "retry-after-ms"} <= {*shown.split(", ")}
    assert "origin" in answer.headers["vary"].lower()


def test_streams_have_cors_headers(keyed: tuple[Server, str]) -> None:
    server, key = keyed
    headers = {"origin": OURS, "authorization": f"Bearer {key}"}
    with server.client.stream("POST", COMPLETIONS, json={**BODY, "stream": True}, headers=headers) as response:
        assert allowed(response) == OURS
        assert response.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("origin", [OTHER, "null", "http://ours.example", f"{OURS}:8443", f"{OURS}.evil.example"])
def test_another_origin_is_not_allowed(origin: str, keyed: tuple[Server, str]) -> None:
    server, key = keyed
    assert allowed(preflight(server, origin)) is None
    assert preflight(server, origin).status_code == 400
    answer = server.client.post(COMPLETIONS, json=BODY, headers={"origin": origin, "authorization": f"Bearer {key}"})
    assert allowed(answer) is None


def test_without_an_origin_there_are_no_cors_headers(keyed: tuple[Server, str]) -> None:
    server, key = keyed
    answer = server.client.post(COMPLETIONS, json=BODY, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    assert allowed(answer) is None


def test_any_origin_can_be_allowed() -> None:
    with running(cors_origins=("*",)) as server:
        for origin in (OURS, OTHER, "null"):
            assert allowed(preflight(server, origin)) == "*"
            assert allowed(server.client.get("/livez", headers={"origin": origin})) == "*"


@pytest.mark.parametrize(
    "origin", ["https://a.example", "http://localhost:3000", "http://[::1]:8080", "vscode-webview://abc", "*"]
)
def test_valid_origins(origin: str) -> None:
    assert load_config(None, {"server.cors_origins": [origin]}).server.cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://a.example/page", "HTTPS://a.example", "https://", "", "null"]
)
def test_invalid_origins_are_rejected(origin: Any) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins.*no origin.*https://a\.example"):
        load_config(None, {"server.cors_origins": [OURS, origin]})


def test_a_file_can_list_origins(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"server:\n  cors_origins: [{OURS}]\n  page: false\n")
    server = load_config(tmp_path / "c.yaml").server
    assert (server.cors_origins, server.page) == ((OURS,), False)
