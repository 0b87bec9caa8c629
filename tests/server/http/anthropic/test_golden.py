"""Requests of Claude Code 2.1, with shortened texts, and what it needs of the answer."""

from __future__ import annotations

from typing import Any

from tests.server.http.harness import MESSAGES, Server

BILLING = "x-anthropic-billing-header: cc_version=2.1.197."
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
    "properties": {"command": {"description": "The command", "type": "string"}}, "required": ["command"],
    "additionalProperties": False,
}  # fmt: skip
CLAUDE_CODE: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<r>"}, {"type": "text", "text": "hi", **CACHED}]},
        {"role": "system", "content": "types"},
    ],
    "system": [
        {"type": "text", "text": BILLING + "123; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are", **CACHED},
    ],
    "tools": [{"name": "Bash", "description": "Runs", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"device_id":"e45e"}'},
    "max_tokens": 90,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14", "x-api-key": "none"}


def test_claude_code(server: Server) -> None:
    expected = "[Bash]system:You are;user:<r>\nhi;system:types;"
    with server.client.stream("POST", f"{MESSAGES}?beta=true", json=CLAUDE_CODE, headers=HEADERS) as response:
        text = response.read().decode()
        assert response.status_code == 200
        assert response.headers["request-id"]
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert [*dict.fromkeys(names)] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    first, *_ = server.named_stream(f"{MESSAGES}?beta=true", **CLAUDE_CODE)
    assert [note["param"] for note in first["message"]["warnings"]] == ["context_management"]
    whole = server.ask(f"{MESSAGES}?beta=true", **CLAUDE_CODE | {"stream": False})
    assert whole["content"] == [{"type": "text", "text": expected}]


def test_conversations_of_claude_code_share_their_system_prompt(server: Server) -> None:
    body = {"model": "fake", "messages": CLAUDE_CODE["messages"]}
    plain = server.ask(f"{MESSAGES}/count_tokens", **body, system="You are\nx-anthropic-billing-header: quoted")
    marked = f"{BILLING}e77; cc_entrypoint=cli;\nYou are\nx-anthropic-billing-header: quoted"
    assert server.ask(f"{MESSAGES}/count_tokens", **body, system=marked) == plain
