"""Without the page the server is otherwise unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.http.app import DIALECTS, ENDPOINTS
from server.http.playground import PLAYGROUND
from tests.server.http.harness import COMPLETIONS, Server, running

HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose configuration disables the page."""
    with running(page=False) as found:
        yield found


def test_the_page_is_not_served(server: Server) -> None:
    response = server.client.get("/", headers=HTML)
    assert (response.status_code, response.text) == (200, "Ollama is running")


@pytest.mark.parametrize("path", ["/page/page.js", "/page/index.html", "/page/info"])
def test_its_assets_are_not_served(path: str, server: Server) -> None:
    response = server.client.get(path, headers=HTML)
    assert (response.status_code, response.headers["content-type"]) == (404, "application/json")


def test_the_api_description_omits_it(server: Server) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert not [path for path in paths if path.startswith("/page")]
    assert "get" in paths["/"]


def test_other_endpoints_are_served(server: Server) -> None:
    assert server.ask(COMPLETIONS, prompt="ab", max_tokens=1)["choices"]
    assert server.client.get("/trace").status_code == 200
    assert [endpoint for endpoint in ENDPOINTS if endpoint not in DIALECTS] == [*PLAYGROUND]
