"""A request's prompt in tokens, as routers request it before they choose a server."""

from __future__ import annotations

from typing import Any

from tests.server.fake_tokenizer import BOS
from tests.server.http.harness import CHAT, COMPLETIONS, Server

RENDER = "/render"


def test_completion_prompts(server: Server) -> None:
    found: Any = server.ask(
        COMPLETIONS + RENDER, model="fake", prompt=["a", [5, 6]], max_tokens=3, temperature=0.5, seed=7
    )
    assert [entry["token_ids"] for entry in found] == [[BOS, 97], [5, 6]]
    name = found[0]["request_id"].removesuffix("-0")
    assert name.startswith("cmpl-")
    assert found[1]["request_id"] == f"{name}-1"
    for entry in found:
        assert entry["model"] == "fake"
        sampling = entry["sampling_params"]
        assert (sampling["max_tokens"], sampling["temperature"], sampling["seed"]) == (3, 0.5, 7)


def test_conversation_prompt(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    found = server.ask(CHAT + RENDER, **body)
    assert bytes(found["token_ids"]) == b"user:hi;"
    assert server.ask(CHAT, **body)["usage"]["prompt_tokens"] == len(found["token_ids"])


def test_rendering_generates_nothing_and_rejects_invalid_fields(server: Server) -> None:
    before = server.serving.client.in_flight
    status, error = server.refused(COMPLETIONS + RENDER, prompt="a", temperature=-1)
    assert (status, error["param"], server.serving.client.in_flight) == (400, "temperature", before)
    assert server.refused(CHAT + RENDER, messages=5)[0] == 400
