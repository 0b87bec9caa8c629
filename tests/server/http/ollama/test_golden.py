"""Verbatim requests of clients, and what each of them needs of the answer."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.server.http.harness import Server
from tests.server.http.ollama.lines import CHAT, GENERATE, SHOW

JSON_HEADERS = {"Content-Type": "application/json"}


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> str:
    """The text of an answer to a body as JavaScript or Rust writes it."""
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    response = server.client.post(path, content=data, headers=JSON_HEADERS | headers)
    assert response.status_code == 200, response.text
    return response.text


def as_continue_reads(text: str) -> list[dict[str, Any]]:
    """Split the stream at line breaks, drop the text after the last one, and give up at an ``error``."""
    found = [json.loads(line) for line in text.split("\n")[:-1] if line.strip()]
    assert all("error" not in part for part in found)
    return found


def continue_options(**more: Any) -> dict[str, Any]:
    return {"temperature": 0.01, "num_predict": 9, "stop": ["<|endoftext|>", "\n\n"], "num_ctx": 32768, **more}


def test_continue_reads_the_models_capabilities(server: Server) -> None:
    shown = json.loads(post(server, SHOW, {"name": "fake"}, Authorization="Bearer x"))
    settings = {}
    for line in shown["parameters"].split("\n"):
        parts = re.match(r'^(\S+)\s+((?:".*")|\S+)$', line)
        assert parts is not None  # it would break off here, and never look for .Suffix
        settings[parts[1]] = parts[2]
    assert int(settings["num_ctx"]) == 128
    assert ".Suffix" in shown["template"]
    models = server.client.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["fake"]


def test_continue_fills_in_the_middle(server: Server) -> None:
    body = {
        "model": "fake", "prompt": "def add(a, b):\n    ", "suffix": "\n", "options": continue_options(),
        "keep_alive": 1800, "stream": True,
    }  # fmt: skip
    parts = as_continue_reads(post(server, GENERATE, body))
    assert all(isinstance(part["response"], str) for part in parts)
    assert "".join(part["response"] for part in parts) == "\x01def add("


def test_continue_sends_a_rendered_template(server: Server) -> None:
    body = {
        "model": "fake", "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "raw": True,
        "options": continue_options(), "keep_alive": 1800, "stream": True,
    }  # fmt: skip
    parts = as_continue_reads(post(server, GENERATE, body))
    assert "".join(part["response"] for part in parts) == "\x02<fim_pre"


def test_continue_chats(server: Server) -> None:
    body: dict[str, Any] = {
        "model": "fake", "messages": [{"role": "user", "content": "hi"}], "options": continue_options(),
        "keep_alive": 1800, "stream": True,
    }  # fmt: skip
    parts = as_continue_reads(post(server, CHAT, body))
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    assert "".join(part["message"]["content"] for part in parts) == "user:hi;"
    tool = {"name": "look", "description": "x", "parameters": {"type": "object", "properties": {}}}
    body |= {"tools": [{"type": "function", "function": tool}], "stream": False}
    body["messages"] = [{"role": "user", "content": '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'}]
    body["options"] = continue_options(num_predict=100)
    (call,) = json.loads(post(server, CHAT, body))["message"]["tool_calls"]
    assert (call["function"]["name"], json.dumps(call["function"]["arguments"])) == ("look", '{"a": 1}')


def test_twinny(server: Server) -> None:
    body = {
        "model": "fake", "prompt": "<fim_prefix> a <fim_suffix> b <fim_middle>", "stream": True, "keep_alive": "5m",
        "options": {"temperature": 0.2, "num_predict": -1},
    }  # fmt: skip
    parts = [json.loads(line) for line in post(server, GENERATE, body).splitlines()]
    # No `raw`, and still the model's own template must not be put around the client's.
    assert "".join(part["response"] for part in parts) == f"\x02{body['prompt']}"
    assert parts[-1]["done"] is True


def test_llm_ls(server: Server) -> None:
    body = {
        "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "model": None, "stream": False,
        "options": {"num_predict": 8, "temperature": 0.2, "top_p": 0.95, "stop": None},
    }  # fmt: skip
    answer = json.loads(post(server, GENERATE, body))
    assert answer["response"] == "\x02<fim_pr"
    assert "error" not in answer


def test_zed_predicts_an_edit(server: Server) -> None:
    stops = ["<|endoftext|>", "<|file_separator|>", "<|fim_pad|>", "<|fim_prefix|>", "<|fim_middle|>", "<PRE>"]
    body = {
        "model": "fake", "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "raw": True, "stream": False,
        "options": {"num_predict": 64, "temperature": 0.2, "stop": stops},
    }  # fmt: skip
    assert isinstance(json.loads(post(server, GENERATE, body))["response"], str)


def test_zed_lists_models_and_chats(server: Server) -> None:
    for model in server.client.get("/api/tags", headers={"Accept": "application/json"}).json()["models"]:
        assert {"name", "modified_at", "digest"} <= set(model)
        assert isinstance(model["size"], int)
        wanted = ("format", "family", "parameter_size", "quantization_level")
        assert all(isinstance(model["details"][name], str) for name in wanted)
    assert "tools" in json.loads(post(server, SHOW, {"model": "fake"}))["capabilities"]
    body = {
        "model": "fake", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        "stream": True, "keep_alive": -1, "tools": [], "think": None,
        "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
    }  # fmt: skip
    for line in post(server, CHAT, body).splitlines():
        part = json.loads(line)
        assert {"model", "created_at", "message", "done"} <= set(part)
        assert part["message"]["role"] == "assistant"
        assert isinstance(part["message"]["content"], str)
    assert (part["done"], part["prompt_eval_count"], part["eval_count"]) == (True, 16, 16)
