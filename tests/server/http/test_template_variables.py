"""Variables of the chat template, under the names of each dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.harness import CHAT, MESSAGES, RESPOND, Server, running

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
OLLAMA: dict[str, Any] = {"model": "fake", "stream": False}
CALLS: dict[str, dict[str, Any]] = {
    CHAT: HI,
    MESSAGES: HI | {"max_tokens": 99},
    RESPOND: {"input": "hi"},
    "/api/chat": HI | OLLAMA,
    "/api/generate": {"prompt": "hi"} | OLLAMA,
}
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(lambda: FakeTokenizer(has_tools=True)) as found:
        yield found


def echoed(server: Server, path: str, **fields: Any) -> str:
    """The prompt, which the fake engine repeats; the fake tokenizer writes the variables in front."""
    answer = server.ask(path, **CALLS[path], **fields)
    assert "warnings" not in answer
    return repr(answer)


@pytest.mark.parametrize("path", CALLS)
def test_variables_are_given_to_the_template(server: Server, path: str) -> None:
    assert "enable_thinking" not in echoed(server, path)
    found = echoed(server, path, chat_template_kwargs={"style": "short", **ON})
    assert "style=" in found
    assert "enable_thinking=True;" in found
    for wrong, field in (({"messages": []}, "chat_template_kwargs.messages"), (3, "chat_template_kwargs")):
        response = server.client.post(path, json={**CALLS[path], "chat_template_kwargs": wrong})
        assert response.status_code == 400
        assert f"{field}: " in response.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_clients_can_turn_thinking_off(server: Server, path: str) -> None:
    assert "enable_thinking=False;" in echoed(server, path, think=False)
    assert "enable_thinking=True;" in echoed(server, path, think=False, chat_template_kwargs=ON)


def test_a_rendered_prompt_has_them(server: Server) -> None:
    assert server.ask("/tokenize", **HI, chat_template_kwargs=OFF)["tokens"] != server.ask("/tokenize", **HI)["tokens"]
    assert "enable_thinking" in server.ask("/apply-template", **HI, chat_template_kwargs=OFF)["prompt"]
