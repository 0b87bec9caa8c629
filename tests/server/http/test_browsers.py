"""Requests that a browser sends for another site's page have no effect; requests of programs are served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.auth.access import BrowserRules
from server.errors import CrossSiteError, HostNotAllowedError
from specdec.config import ServerConfig, load_config
from specdec.errors import ConfigError
from tests.server.http.harness import COMPLETIONS, Server

BODY = json.dumps({"prompt": "ab", "max_tokens": 1})
EVIL = "https://evil.example"


def post(server: Server, **headers: str) -> tuple[int, str]:
    """Return status and reason of a completion that is requested with these headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = server.client.post(COMPLETIONS, content=BODY, headers=named)
    return response.status_code, "" if response.status_code == 200 else response.json()["error"]["code"]


@pytest.mark.parametrize(
    "kind", ["text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
@pytest.mark.parametrize(
    "sender",
    [
        {"origin": EVIL, "sec_fetch_site": "cross-site"},
        {"origin": EVIL},  # an older browser
        {"origin": "null"},  # a sandboxed frame
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},  # another program of this machine
        {"sec_fetch_site": "cross-site"},
    ],
)
def test_a_cross_site_browser_request_is_rejected(server: Server, kind: str | None, sender: dict[str, str]) -> None:
    assert post(server, **sender, **({"content_type": kind} if kind else {})) == (403, "cross_site")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8401", "127.0.0.1.evil.example", "localhost.evil.example", "10.evil"]
)
def test_a_rebound_host_name_is_rejected(server: Server, host: str) -> None:
    rebound = {"host": host, "origin": f"http://{host}", "sec_fetch_site": "same-origin"}
    assert post(server, **rebound, content_type="application/json") == (403, "host_not_allowed")
    for path in ("/", "/trace", "/metrics", "/v1/models"):
        assert server.client.get(path, headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "sender",
    [
        {},  # a program that sends no such header
        {"content_type": "application/x-www-form-urlencoded"},  # curl -d
        {"content_type": "text/plain"},
        {"content_type": "application/json; charset=utf-8"},
        {
            "content_type": "application/json",
            "origin": "app://obsidian.md",
        },  # browsers send a preflight; this is a program
        {"content_type": "application/json", "origin": "chrome-extension://abc", "sec_fetch_site": "none"},
        {"content_type": "text/plain", "sec_fetch_mode": "cors"},  # Node's fetch
    ],
)
def test_requests_of_programs_are_served(server: Server, sender: dict[str, str]) -> None:
    assert post(server, **sender) == (200, "")


def test_the_servers_own_page_is_served(server: Server) -> None:
    ours = {"origin": server.url, "sec_fetch_site": "same-origin"}
    for kind in ("application/json", "text/plain"):
        assert post(server, **ours, content_type=kind) == (200, "")
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}  # somebody follows a link to it
    assert server.client.get("/", headers=linked).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8401",
        "localhost.",
        "a.localhost",
        "127.0.0.1:1",
        "[::1]:8401",
        "192.168.1.5",
        "box",
        "box.local",
    ],
)
def test_loopback_names_are_always_allowed(server: Server, host: str) -> None:
    assert server.client.get("/livez", headers={"host": host}).status_code == 200


def check(config: dict[str, Any], method: str = "POST", **headers: str) -> type[Exception] | None:
    """Return what `BrowserRules` decides under a configuration."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        BrowserRules(ServerConfig(**config)).check(method, lambda name: sent.get(name, ""))
    except (CrossSiteError, HostNotAllowedError) as error:
        return type(error)
    return None


def test_allowed_hosts_follow_from_the_configuration() -> None:
    for config in ({"host": "0.0.0.0"}, {"keys_file": "k.yaml"}, {"allowed_hosts": ("*",)}):
        assert check(config, host="llm.example") is None
    named = {"allowed_hosts": ("llm.example", "*.lab.example"), "host": "0.0.0.0"}
    for host in ("llm.example", "LLM.example:443", "a.b.lab.example", "10.0.0.1:8401"):
        assert check(named, host=host) is None
    for host in ("example", "lab.example", "evil.example", "notlab.example"):
        assert check(named, host=host) is (None if "." not in host else HostNotAllowedError)


def test_origins_allowed_by_cors_may_send_any_request() -> None:
    for origins in (("https://ours.example",), ("*",)):
        allowed = {"origin": "https://ours.example", "sec_fetch_site": "cross-site", "host": "localhost"}
        assert check({"cors_origins": origins}, **allowed, content_type="text/plain") is None
    assert check({"cors_origins": ("https://ours.example",)}, origin=EVIL, host="localhost") is CrossSiteError


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "A.example", "", "a b", "*.", "a.*"])
def test_an_invalid_host_name_is_rejected(host: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_hosts.*no host name.*a\.example"):
        load_config(None, {"server.allowed_hosts": [host]})
