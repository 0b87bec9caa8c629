"""How the page is served: to whom, from where, for how long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from specdec.api.generate import ROOT
from tests.server.auth.key_files import make_key
from tests.server.http.harness import Server, running

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
STATIC = ROOT / "server" / "playground" / "static"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A ready server."""
    with running() as found:
        yield found


def get_page(server: Server) -> httpx.Response:
    response = server.client.get("/", headers={"accept": BROWSER})
    assert response.status_code == 200
    return response


@pytest.mark.parametrize("accept", [BROWSER, "text/html", "TEXT/HTML;q=0.1", "*/*, application/xhtml+xml ; q=1"])
def test_browsers_get_the_page(server: Server, accept: str) -> None:
    response = server.client.get("/", headers={"accept": accept})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == (STATIC / "index.html").read_bytes()
    assert response.headers["vary"] == "accept"


@pytest.mark.parametrize("accept", ["*/*", "", "application/json", "text/plain"])
def test_other_clients_get_ollamas_greeting(server: Server, accept: str) -> None:
    response = server.client.get("/", headers={"accept": accept})
    assert (response.text, response.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")


def test_every_file_is_served_here_and_not_kept(server: Server) -> None:
    named = re.findall(r'(?:src|href)="([^"]+)"', get_page(server).text)
    assert len(named) == 3
    for path in ("/", *named):
        first = server.client.get(path, headers={"accept": BROWSER})
        assert (first.status_code, first.headers["cache-control"]) == (200, "no-cache")


@pytest.mark.parametrize("name", ["nothing.js", "index.html.bak", "..%2fendpoints.py", "%2e%2e"])
def test_no_other_path_is_served(server: Server, name: str) -> None:
    response = server.client.get(f"/page/{name}")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"


def test_its_policy_allows_this_origin_only(server: Server) -> None:
    page = get_page(server)
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.findall(r"<style|<script(?![^>]*src=)| on\w+=| style=", page.text)
    for file in STATIC.iterdir():
        hosts = set(re.findall(rb"https?://([\w.-]+)", file.read_bytes()))
        assert hosts <= {b"www.w3.org"}, file.name  # names of SVG and MathML, which are not fetched


def test_engine_description(server: Server) -> None:
    page_info = server.client.get("/page/info").json()
    info = server.serving.client.info
    assert (page_info["model"], page_info["drafters"], page_info["max_context"]) == (
        info.target,
        [*info.drafters],
        info.max_context,
    )
    assert page_info["models"] == [info.target]


def test_the_page_needs_no_key_but_its_calls_do(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "page")
    with running(keys_file=path) as server:
        page = get_page(server)
        for link in ("/docs", *re.findall(r'(?:src|href)="([^"]+)"', page.text)):
            assert server.client.get(link).status_code == 200
        for wanted in ("/page/info", "/trace"):
            assert server.client.get(wanted).status_code == 401
            assert server.client.get(wanted, headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_it_is_served_before_the_engine_is_ready() -> None:
    with running(wait=False) as server:
        get_page(server)
