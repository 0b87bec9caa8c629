"""Requests of Codex 0.169, with shortened texts, and what it needs of the answer."""

from __future__ import annotations

from typing import Any

from tests.server.http.harness import RESPOND, Server

SCHEMA = {
    "type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"type": "function", "name": "exec_command", "description": "Runs", "strict": False, "parameters": SCHEMA}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": "msg_01", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX: dict[str, Any] = {
    "model": "fake",
    "stream": True,
    "input": [
        message("developer", "You are"),
        message("developer", "<s>"),
        message("user", "<e>"),
        message("user", "hi"),
    ],
    "tools": [
        FUNCTION,
        {"type": "namespace", "name": "agents", "tools": [{**FUNCTION, "name": "close_agent"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a206ca",
    "client_metadata": {"session_id": "01a206ca"},
}


def test_codex(server: Server) -> None:
    events = server.named_stream(RESPOND, **CODEX)
    (item,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert item["content"][0]["text"] == "[exec_command]system:You are\n<s>;user:<e>\nhi;"
    last = events[-1]["response"]
    assert last["usage"]["total_tokens"] > 0
    assert [note["param"] for note in last["warnings"]] == ["tools[1]", "tools[2]"]
