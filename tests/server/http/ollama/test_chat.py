"""Answers of /api/chat, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.http.harness import Server
from tests.server.http.ollama.lines import CHAT, FIGURES, lines, refused, timed
from tests.server.http.ollama.test_generate import EXTRAS

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def test_complete_response(server: Server) -> None:
    answer = timed(server.ask(CHAT, model="FAKE", messages=HI, stream=False, options={"num_predict": 7}))
    assert answer == {
        "model": "FAKE", "message": {"role": "assistant", "content": "user:hi"}, "done": True, "done_reason": "length",
        "prompt_eval_count": 8, "eval_count": 7, **FIGURES, **EXTRAS,
    }  # fmt: skip


def test_streamed_response(server: Server) -> None:
    found = [timed(line) for line in lines(server, CHAT, messages=HI, options={"num_predict": 3})]
    assert found == [
        *({"model": "fake", "message": {"role": "assistant", "content": text}, "done": False} for text in "use"),
        {
            "model": "fake", "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "length",
            "prompt_eval_count": 8, "eval_count": 3, **FIGURES, **EXTRAS,
        },
    ]  # fmt: skip


def calls_of(text: str, arguments: Any = None) -> list[dict[str, Any]]:
    return [{"index": 0, "name": "look", "arguments": {"at": 1} if arguments is None else arguments}]


def test_tool_calls_have_objects_as_arguments(server: Server) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": CALL}], "tools": TOOLS}
    (whole,) = [server.ask(CHAT, stream=False, **fields)["message"]]
    assert whole["content"].startswith("[look]user:")
    assert [call["function"] for call in whole["tool_calls"]] == calls_of(CALL)
    found = [line["message"] for line in lines(server, CHAT, **fields)]
    assert all(set(message) <= {"role", "content", "tool_calls"} for message in found)
    assert "".join(message["content"] for message in found) == whole["content"]
    streamed = [call for message in found for call in message.get("tool_calls", [])]
    assert [call["function"] for call in streamed] == calls_of(CALL)
    assert len({call["id"] for call in streamed + whole["tool_calls"]}) == 2


def test_tool_calls_are_numbered_across_the_response(server: Server) -> None:
    twice = '<tool_call>{"name": "a"}</tool_call>' * 2
    body: dict[str, Any] = {"messages": [{"role": "user", "content": twice}], "tools": TOOLS}
    found = [call for line in lines(server, CHAT, **body) for call in line["message"].get("tool_calls", [])]
    assert [(call["function"]["index"], call["function"]["arguments"]) for call in found] == [(0, {}), (1, {})]
    whole = server.ask(CHAT, stream=False, **body)["message"]["tool_calls"]
    assert [call["function"]["index"] for call in whole] == [0, 1]


@pytest.mark.parametrize(("generated", "arguments"), [("[1]", {"value": [1]}), ('"no JSON"', {"value": "no JSON"})])
def test_tool_arguments_that_are_not_an_object(server: Server, generated: str, arguments: dict[str, Any]) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {generated}}}</tool_call>'
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "tools": TOOLS}
    (call,) = server.ask(CHAT, stream=False, **body)["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments


def test_without_tools_a_call_is_text(server: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": CALL}], "tools": []}
    assert "".join(line["message"]["content"] for line in lines(server, CHAT, **body)) == f"user:{CALL};"
    assert server.ask(CHAT, stream=False, **body)["message"] == {"role": "assistant", "content": f"user:{CALL};"}


def test_a_conversation_with_calls_and_their_results(server: Server) -> None:
    talk = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]},
        {"role": "tool", "tool_name": "look", "content": json.dumps({"seen": True})},
    ]
    answer = server.ask(CHAT, messages=talk, stream=False)["message"]["content"]
    assert answer == 'user:hi;assistant:;tool:{"seen": true};'


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    begun: dict[str, Any] = {"role": "assistant", "content": "ab"}
    assert server.ask(CHAT, messages=[*HI, begun], stream=False)["message"]["content"] == "user:hi;ab"
    called = begun | {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    assert server.ask(CHAT, messages=[*HI, called], stream=False)["message"]["content"] == "user:hi;assistant:ab;"


@pytest.mark.parametrize("messages", [None, []])
def test_an_empty_request_returns_immediately(server: Server, messages: Any) -> None:
    assert timed(server.ask(CHAT, messages=messages)) == {
        "model": "fake", "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "load",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("named", "body"),
    [
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": {}}),
        ("messages[0].role", {"messages": [{"content": "hi"}]}),
        ("messages[1].images", {"messages": [*HI, {"role": "user", "content": "a", "images": ["aGk="]}]}),
        ("tools[0].function", {"messages": HI, "tools": [{}]}),
        ("options.top_k", {"messages": HI, "options": {"top_k": "all"}}),
        ("format", {"messages": HI, "format": ["json"]}),
    ],
)
def test_invalid_fields_are_named(server: Server, named: str, body: dict[str, Any]) -> None:
    assert refused(server, CHAT, 400, **body).startswith(f"{named}: ")


def test_other_errors(server: Server) -> None:
    assert refused(server, CHAT, 404, model="llama3", messages=HI).startswith("model not found: ")
    assert refused(server, CHAT, 400, messages=[{"role": "user", "content": "x" * 200}])
