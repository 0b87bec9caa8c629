"""Answers of /v1/messages, field by field."""

from __future__ import annotations

from typing import Any

from server.http.anthropic import stop_fields
from specdec.core.types import Finished, FinishReason, SpeculationStats, Timings, Usage
from tests.fake_engine import DEFAULT_SEED
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.harness import MESSAGES, Server
from tests.server.http.test_completions import SPECULATIVE

HI = [{"role": "user", "content": "hi"}]
ECHO = "user:hi;"
EXTRAS = {"seed": DEFAULT_SEED, "metrics": {"speculative_decoding": SPECULATIVE}}
HEAD = {"type": "message", "role": "assistant", "model": "fake"}
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
SAID = 'Let me.\n<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3,
        "output_tokens": output,
    }  # fmt: skip


def ended(reason: str, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence}


def test_complete_response(server: Server) -> None:
    answer = server.ask(MESSAGES, messages=HI, max_tokens=8)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        **HEAD, "content": [{"type": "text", "text": ECHO}], **ended("max_tokens"), "usage": usage(8, 8), **EXTRAS,
    }  # fmt: skip


def test_streamed_response(server: Server) -> None:
    start, ping, *rest = server.named_stream(MESSAGES, messages=HI, max_tokens=8)
    assert start["message"].pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {**HEAD, "content": [], **ended(None), "usage": usage(8, 0)},  # type: ignore[arg-type]
    }
    assert ping == {"type": "ping"}
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": c}} for c in ECHO),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ended("max_tokens"), "usage": usage(8, 8), **EXTRAS},
        {"type": "message_stop"},
    ]


def test_stop_reasons(server: Server) -> None:
    assert server.ask(MESSAGES, messages=HI, max_tokens=0)["content"] == []
    for asked in ({"max_tokens": 99}, {}):  # the fake has no more text, as at the end of its context
        assert server.ask(MESSAGES, messages=HI, **asked)["stop_reason"] == "model_context_window_exceeded"

    def end(reason: FinishReason, matched: str | int | None = None, called: bool = False) -> tuple[str, str | None]:
        finished = Finished("", 0, reason, matched, Usage(output_tokens=5), SpeculationStats(), Timings())
        fields = stop_fields(finished, called, 5, FakeTokenizer())
        return fields["stop_reason"], fields["stop_sequence"]

    assert end(FinishReason.EOS, 2) == ("end_turn", None)
    assert end(FinishReason.EOS, 2, called=True) == ("tool_use", None)
    assert end(FinishReason.LENGTH, called=True) == ("max_tokens", None)
    assert end(FinishReason.STOP_STRING, "a", called=True) == ("stop_sequence", "a")
    assert end(FinishReason.STOP_TOKEN, 2) == ("stop_sequence", "<bos>")
    assert end(FinishReason.ABORTED) == ("abort", None)


def test_tool_calls_are_content_blocks(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": SAID}], "tools": TOOLS}
    text, call, rest = server.ask(MESSAGES, **body)["content"]
    assert text == {"type": "text", "text": "[look]user:Let me."}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "tool_use", "name": "look", "input": {"at": 1}}
    assert rest == {"type": "text", "text": ";"}
    events = server.named_stream(MESSAGES, **body)
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use", "text"]
    assert starts[1].pop("id").startswith("call_")
    assert starts[1] == {"type": "tool_use", "name": "look", "input": {}}
    arguments = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 1]
    assert "".join(delta["partial_json"] for delta in arguments).replace(" ", "") == '{"at":1}'
    assert {delta["type"] for delta in arguments} == {"input_json_delta"}
    order = [event["index"] for event in events if "index" in event]
    assert order == sorted(order)
    assert [event["type"] for event in events].count("content_block_stop") == 3


def test_server_side_tools_are_rejected(server: Server) -> None:
    body = {"messages": HI, "max_tokens": 99, "tools": [{"type": "web_search_20250305", "name": "web_search"}, *TOOLS]}
    answer = server.ask(MESSAGES, **body)
    assert answer["content"][0]["text"] == f"[look]{ECHO}"
    assert [note["param"] for note in answer["warnings"]] == ["tools[0]"]
    assert server.named_stream(MESSAGES, **body)[0]["message"]["warnings"] == answer["warnings"]
    assert server.refused(MESSAGES, **body, tool_choice={"type": "tool", "name": "web_search"})[0] == 400


def test_counting_tokens(server: Server) -> None:
    count = "/v1/messages/count_tokens"
    assert server.ask(count, messages=HI, system="be", model="fake") == {"input_tokens": len(f"system:be;{ECHO}")}
    assert server.ask(count, messages=HI, tools=TOOLS) == {"input_tokens": len(f"[look]{ECHO}")}
    assert server.refused(count, messages=[])[1]["param"] == "messages"


def test_errors_have_anthropics_shape(server: Server) -> None:
    response = server.client.post(MESSAGES, json={"messages": HI, "max_tokens": -2}, headers={"x-request-id": "mine"})
    assert response.status_code == 400
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    assert response.json() == {
        "type": "error",
        "error": {
            "type": "invalid_request_error", "message": "max_tokens: must not be negative, and below 2^32",
            "param": "max_tokens", "code": "invalid_argument", "details": {"error_code": "invalid_argument"},
        },
    }  # fmt: skip
    for body, status, kind in (
        ({"model": "other"}, 404, "not_found_error"), ({"cache_salt": "full"}, 429, "rate_limit_error"),
        ({"cache_salt": "bug"}, 500, "api_error"),
    ):  # fmt: skip
        found, error = server.refused(MESSAGES, messages=HI, **body)
        assert (found, error["type"]) == (status, kind)
    for path, status in ((f"{MESSAGES}/batches", 404), (MESSAGES, 405)):
        response = server.client.get(path)
        assert (response.status_code, response.json()["type"]) == (status, "error")
        assert response.headers["request-id"] == response.headers["x-request-id"]
    *_, last = server.named_stream(MESSAGES, messages=HI, cache_salt="broken")
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == ("error", "api_error", "model_broken")


def test_clients_are_told_to_send_the_whole_conversation(server: Server) -> None:
    """As the client `anthropic` reads it, which otherwise sends only what is new."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        status, error = server.refused(MESSAGES, messages=HI, max_tokens=9, thread=thread)
        assert (status, error["param"]) == (400, "thread")
        assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert server.ask(MESSAGES, messages=HI, max_tokens=9, thread=None)["content"]


def test_message_ids(server: Server) -> None:
    response = server.client.post(MESSAGES, json={"messages": HI}, headers={"x-request-id": "mine"})
    assert (response.json()["id"], response.headers["request-id"]) == ("msg_mine", "mine")
