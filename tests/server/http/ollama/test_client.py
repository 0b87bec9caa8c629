"""Ollama's own Python client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.fake_engine import WEIGHT_BYTES
from tests.server.http.harness import Server
from tests.server.http.ollama.test_chat import CALL, HI, TOOLS


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    """A client of the server."""
    found = ollama.Client(host=server.url)
    yield found
    found._client.close()


def test_generate(client: ollama.Client) -> None:
    body: dict[str, Any] = {"model": "fake", "prompt": "hi", "options": {"num_predict": 6, "temperature": 0}}
    whole = client.generate(**body)
    assert (whole.response, whole.done, whole.done_reason, whole.eval_count) == ("user:h", True, "length", 6)
    assert whole.context is not None
    assert whole.total_duration is not None
    parts = list(client.generate(**body, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response
    assert (parts[-1].done, parts[-1].context) == (True, whole.context)
    assert client.generate("fake", "a", suffix="b").response == "\x01a\x02b\x03"
    assert client.generate("fake", "hi", context=whole.context).prompt_eval_count == len(whole.context) + 8
    assert client.generate("fake", keep_alive="5m").done_reason == "load"
    assert client.generate("fake", "hi", format="json", keep_alive=-1).response


def test_chat(client: ollama.Client) -> None:
    assert client.chat("fake", HI).message.content == "user:hi;"
    parts = list(client.chat("fake", HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "user:hi;"
    calling = client.chat("fake", [{"role": "user", "content": CALL}], tools=TOOLS)
    (call,) = calling.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("look", {"at": 1})
    answered: list[Any] = [*HI, calling.message, {"role": "tool", "content": "1", "tool_name": "look"}]
    assert (client.chat("fake", answered).message.content or "").endswith("tool:1;")


def test_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert (model.model, model.details and model.details.quantization_level) == ("fake", "int8")
    assert model.size == WEIGHT_BYTES
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("fake", 128)
    assert client.show("fake").capabilities == ["completion", "insert", "tools"]


def test_the_client_raises_its_own_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.generate("llama3", "a")
    assert (caught.value.status_code, caught.value.error.split(":")[0]) == (404, "model not found")
    with pytest.raises(ollama.ResponseError) as caught:
        list(client.chat("fake", HI, options={"temperature": -1}, stream=True))
    assert (caught.value.status_code, caught.value.error.split(":")[0]) == (400, "options.temperature")
    assert client.pull("fake").status == "success"
    assert [part.status for part in client.pull("fake", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="model not found"):
        client.pull("llama3")
    for call in (lambda: client.delete("llama3"), lambda: client.copy("a", "b")):
        with pytest.raises(ollama.ResponseError, match="nothing is served at '/api/"):
            call()


def test_logprobs(client: ollama.Client) -> None:
    body: dict[str, Any] = {"model": "fake", "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    for whole, parts in (
        (client.generate(**body, prompt="hi"), list(client.generate(**body, prompt="hi", stream=True))),
        (client.chat(**body, messages=HI), list(client.chat(**body, messages=HI, stream=True))),
    ):
        reported = whole.logprobs or []
        assert [(row.token, row.logprob) for row in reported] == [("u", -0.5), ("s", -0.5), ("e", -0.5)]
        assert [[top.token for top in row.top_logprobs or []] for row in reported] == [[t, "\x01"] for t in "use"]
        assert [row for part in parts for row in part.logprobs or []] == reported
    assert client.generate("fake", "hi").logprobs is None


def test_thinking_is_rejected_with_an_explanation(client: ollama.Client) -> None:
    for think in (True, "high"):
        with pytest.raises(ollama.ResponseError, match="'fake' does not support thinking"):
            client.chat("fake", HI, think=think)
        with pytest.raises(ollama.ResponseError, match="'fake' does not support thinking"):
            client.generate("fake", "hi", think=think)
