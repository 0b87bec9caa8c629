"""Keys, limits and TLS on the HTTP port, with OpenAI's own client."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.errors import (
    LateError,
    PermissionDeniedError,
    RateLimitedError,
    SupersededError,
    UnauthenticatedError,
)
from server.http.app import ENDPOINTS
from server.http.errors import refusal_of
from server.http.openai_format import OPENAI_ERRORS
from server.serving import Serving
from specdec.config import ServerConfig
from specdec.errors import ConfigError
from tests.fake_engine import CHAT, EMBEDDER
from tests.server.auth.certificates import Certificates
from tests.server.auth.key_files import make_key
from tests.server.harness import make_config
from tests.server.http.harness import COMPLETIONS, MESSAGES, Server, events, running, running_serving
from tests.server.several_models import make_several, serving, several

ENGINES: dict[str, dict[str, Any]] = {"fake": {"target": CHAT}, "embed": {"target": EMBEDDER}}
OPEN = {"/livez", "/ping", "/readyz", "/version", "/health", "/", "/docs", "/page/{name}"}


@dataclass
class Guarded:
    """A server over TLS, and keys of it."""

    server: Server
    tls: ssl.SSLContext
    keys: dict[str, str]

    def openai(self, key: str) -> openai.OpenAI:
        """A client that shows a key."""
        return openai.OpenAI(
            base_url=f"{self.server.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx.Client(verify=self.tls, timeout=20),
        )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with keys, over TLS, of a model that writes and one that embeds."""
    folder = tmp_path_factory.mktemp("guarded")
    made, path = Certificates(folder), folder / "keys.yaml"
    limits: dict[str, dict[str, Any]] = {
        "free": {}, "slow": {"requests_per_minute": 1}, "one": {"max_concurrent": 1},
        "two": {"max_concurrent": 2}, "low": {"max_priority": -3},
        "texts": {"requests_per_minute": 2}, "inputs": {"requests_per_minute": 2},
        "scores": {"requests_per_minute": 1},
    }  # fmt: skip
    keys = {name: make_key(path, name, **more) for name, more in limits.items()}
    tls = made.client_context()
    config = make_several(ENGINES, keys_file=path, tls_cert=made.cert, tls_key=made.key)
    with running_serving(serving(config), tls=tls) as server:
        yield Guarded(server, tls, keys)


def test_a_client_with_a_key_is_served_over_tls(guarded: Guarded) -> None:
    with guarded.openai(guarded.keys["free"]) as client:
        whole = client.completions.create(model="fake", prompt="abc", max_tokens=3)
        assert whole.choices[0].text == "\x02ab"
        parts = client.completions.create(model="fake", prompt="abc", max_tokens=3, stream=True)
        assert "".join(choice.text for chunk in parts for choice in chunk.choices) == "\x02ab"
        assert [model.id for model in client.models.list()] == ["fake", "embed"]
    answer = guarded.server.client.post(
        COMPLETIONS, json={"prompt": "a"}, headers={"x-api-key": guarded.keys["free"], "x-request-id": "mine"}
    )
    assert answer.json()["id"] == "cmpl-mine"  # not the name under which the engine registered it


def test_an_unknown_client_is_401_without_details(guarded: Guarded) -> None:
    with guarded.openai("sd-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.completions.create(model="fake", prompt="a")
    assert caught.value.code == "unauthenticated"
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    for headers in ({}, {"authorization": f"Basic {guarded.keys['free']}"}, {"authorization": "Bearer"}):
        for data in (b'{"prompt":"a"}', b"{", b"x" * 100_000):  # for any body, since it is not read
            response = guarded.server.client.post(COMPLETIONS, content=data, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{guarded.server.port}/livez")  # not in the clear


def test_anthropics_header_is_accepted_as_a_key(guarded: Guarded) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        response = guarded.server.client.post(path, json=body, headers={"x-api-key": guarded.keys["free"]})
        assert response.status_code == 200
        response = guarded.server.client.post(path, json=body, headers={"x-api-key": "sd-wrong"})
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        assert response.json()["type"] == "error"


def test_only_probes_need_no_key(guarded: Guarded) -> None:
    shut = [endpoint for endpoint in ENDPOINTS if endpoint.path not in OPEN]
    for endpoint in shut:
        path = endpoint.path.replace("{model:path}", "fake")
        assert guarded.server.client.request(endpoint.method, path).status_code == 401, endpoint.path
    for path in ("/livez", "/ping", "/readyz", "/version"):
        assert guarded.server.client.get(path).status_code == 200


def test_an_exhausted_key_is_429_with_retry_after(guarded: Guarded) -> None:
    with guarded.openai(guarded.keys["slow"]) as client:
        client.completions.create(model="fake", prompt="a")
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="fake", prompt="a", stream=stream)
            assert caught.value.code == "rate_limited"
            headers = caught.value.response.headers
            assert 1 <= int(headers["retry-after"]) <= 60
            assert 0 < int(headers["retry-after-ms"]) <= 60_000


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_run_as_many_at_once_as_the_key_allows(stream: bool, guarded: Guarded) -> None:
    headers = {"x-api-key": guarded.keys["one"]}
    for _ in range(2):
        body = {"prompt": ["ab", "cd", "ef"], "max_tokens": 3, "n": 2, "stream": stream}
        answer = guarded.server.client.post(COMPLETIONS, json=body, headers=headers)
        assert answer.status_code == 200
        texts = [""] * 6
        for chunk in events(answer.content)[:-1] if stream else [answer.json()]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["\x02ab", "ab\x02", "\x02cd", "cd\x02", "\x02ef", "ef\x02"]
    assert guarded.server.comes_to(lambda: guarded.server.serving.client.in_flight == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["ab", "cd", "ef"], "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["ab", "cd", "ef"]}),
    ],
)
def test_several_texts_run_beside_another_call_of_the_key(path: str, body: dict[str, Any], guarded: Guarded) -> None:
    client, headers = guarded.server.client, {"x-api-key": guarded.keys["two"]}
    other = {"prompt": "x" * 100, "max_tokens": 100, "cache_salt": "slow", "stream": True}
    with client.stream("POST", COMPLETIONS, json=other, headers=headers) as running:
        next(running.iter_raw())
        answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert guarded.server.comes_to(lambda: guarded.server.serving.client.in_flight == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": ["x" * 60] * 9}), ("/v1/embeddings", {"input": ["x" * 60] * 9})],
)
def test_a_call_does_not_fill_the_queue_for_its_own_texts(path: str, body: dict[str, Any]) -> None:
    with several(ENGINES, max_queued_tokens=150) as server:
        server.ask(path, **body)


@pytest.mark.parametrize(
    ("key", "path", "body"),
    [
        ("texts", COMPLETIONS, {"prompt": ["abc"] * 5}),
        ("inputs", "/v1/embeddings", {"input": ["abc"] * 5}),
        ("scores", COMPLETIONS, {"prompt": [97, 0, 98], "echo": True, "logprobs": 1}),  # two windows, then the answer
    ],
)
def test_a_call_that_has_begun_may_exceed_the_rates(
    key: str, path: str, body: dict[str, Any], guarded: Guarded
) -> None:
    """Refused amid its texts, it could never succeed."""
    headers = {"x-api-key": guarded.keys[key]}
    answers = [guarded.server.client.post(path, json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert float(answers[1].headers["retry-after"]) > 60  # for all texts of the first call


def test_client_certificates_are_required_if_configured(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    files = {"tls_cert": made.cert, "tls_key": made.key, "tls_client_ca": made.ca}
    with running(tls=made.client_context(shows=True), **files) as server:
        assert server.client.get("/livez").status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/livez", verify=made.client_context())


def test_an_insecure_configuration_is_rejected_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    make_key(path, "a")
    with pytest.raises(ValueError, match="in the clear"):
        ServerConfig(host="0.0.0.0", http_port=0, keys_file=path)
    for missing in ({"keys_file": tmp_path / "none"}, {"tls_cert": tmp_path / "none", "tls_key": tmp_path / "none"}):
        with pytest.raises(ConfigError, match="none"):
            Serving(make_config(http_port=0, **missing), lambda: None)  # type: ignore[arg-type,return-value]


def test_every_authentication_error_has_a_status() -> None:
    for error, status, kind in (
        (UnauthenticatedError("x"), 401, "authentication_error"), (PermissionDeniedError("x"), 403, "permission_error"),
        (RateLimitedError("k", "l", 1, 2.5), 429, "rate_limit_error"), (LateError(3, 2, 1.5), 429, "rate_limit_error"),
        (SupersededError(), 409, "invalid_request_error"),
    ):  # fmt: skip
        refusal = refusal_of(error, {})
        assert (refusal.status, OPENAI_ERRORS.body(refusal)["error"]["type"]) == (status, kind)
        assert (b"retry-after" in dict(refusal.headers)) == (status == 429)
        assert (b"www-authenticate" in dict(refusal.headers)) == (status == 401)
