"""Clients' queries about the server and its model."""

from __future__ import annotations

from typing import Any

from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.harness import Server, running
from tests.server.http.ollama.lines import SHOW, refused

DETAILS = {
    "parent_model": "", "format": "specdec", "family": "specdec", "families": ["specdec"], "parameter_size": "",
    "quantization_level": "int8",
}  # fmt: skip


def get(server: Server, path: str) -> Any:
    response = server.client.get(path)
    assert response.status_code == 200
    return response.json()


def test_the_model_is_listed_and_loaded(server: Server) -> None:
    (listed,) = get(server, "/api/tags")["models"]
    (loaded,) = get(server, "/api/ps")["models"]
    assert loaded == listed | {"expires_at": "2999-12-31T23:59:59Z", "size_vram": 0, "context_length": 128}
    assert (len(listed.pop("digest")), listed.pop("modified_at")[-1]) == (64, "Z")
    assert listed == {"name": "fake", "model": "fake", "size": 4_321, "details": DETAILS}


def test_capabilities(server: Server) -> None:
    for body in ({"model": "fake"}, {"name": "fake:latest"}, {"model": "Fake", "verbose": True}):
        shown = server.ask(SHOW, **body)
        assert shown.pop("modified_at").endswith("Z")
        assert shown == {
            "modelfile": "", "parameters": "num_ctx 128", "details": DETAILS,
            "template": "{{ if .Suffix }}{{ .Prompt }}{{ .Suffix }}{{ else }}{{ if .Tools }}{{ .Tools }}{{ end }}"
            "{{ .Prompt }}{{ end }}",
            "model_info": {
                "general.architecture": "specdec", "general.basename": "fake", "specdec.context_length": 128,
                "specdec.vocab_size": 256,
            },
            "capabilities": ["completion", "insert", "tools"],
        }  # fmt: skip
    assert refused(server, SHOW, 404, model="llama3").startswith("model not found: ")
    assert refused(server, SHOW, 400, model=5).startswith("model: ")


def test_a_pull_of_the_served_model_succeeds_at_once(server: Server) -> None:
    streamed = server.client.post("/api/pull", json={"model": "fake"})
    assert (streamed.status_code, streamed.text) == (200, '{"status":"success"}\n')
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert server.ask("/api/pull", name="fake:latest", stream=False) == {"status": "success"}
    assert refused(server, "/api/pull", 404, model="llama3").startswith("model not found: ")


def test_missing_capabilities_are_not_listed() -> None:
    with running(FakeTokenizer) as server:
        shown = server.ask(SHOW, model="fake")
        assert (shown["capabilities"], shown["template"]) == (["completion"], "{{ .Prompt }}")


def test_version_and_root_respond(server: Server) -> None:
    response = server.client.get("/")
    assert (response.status_code, response.text) == (200, "Ollama is running")
    assert response.headers["content-type"].startswith("text/plain")
    response = server.client.head("/")
    assert (response.status_code, response.content) == (200, b"")
    assert tuple(map(int, get(server, "/api/version")["version"].split("."))) >= (0, 6, 4)


def test_while_loading_only_version_and_root_respond() -> None:
    with running(wait=False) as server:
        response = server.client.post("/api/generate", json={"prompt": "a"})
        assert (response.status_code, set(response.json())) == (503, {"error"})
        assert int(response.headers["retry-after"]) >= 1
        assert server.client.get("/").status_code == 200
        assert server.client.get("/api/version").status_code == 200
