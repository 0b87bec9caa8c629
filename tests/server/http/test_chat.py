"""Answers of /v1/chat/completions, field by field."""

from __future__ import annotations

import json
from typing import Any

from server.http.openai_chat import message_of
from server.http.tool_use import AnswerForm, ToolUse
from specdec.models.tool_forms import ToolForm
from tests.fake_engine import DEFAULT_SEED
from tests.server.http.harness import CHAT, Server, events
from tests.server.http.test_completions import HEAD, SPECULATIVE, checked, usage

HI = [{"role": "user", "content": "hi"}]
ECHO = "user:hi;"


def kinds(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, checked, without its end mark."""
    chunks = server.stream(CHAT, **body)
    assert chunks.pop() == "[DONE]"
    return [checked(chunk, "chat.completion.chunk", "chatcmpl-") for chunk in chunks]


def test_complete_response(server: Server) -> None:
    body = {"messages": HI, "prediction": {"type": "content", "content": "user!"}}
    assert checked(server.ask(CHAT, **body), "chat.completion", "chatcmpl-") == {
        **HEAD,
        "choices": [
            {
                "index": 0, "message": {"role": "assistant", "content": ECHO, "refusal": None}, "logprobs": None,
                "finish_reason": "length", "stop_reason": None,
            }
        ],
        "usage": usage(8, 8, accepted=4, rejected=1),
        "seed": DEFAULT_SEED,
        "metrics": {"speculative_decoding": SPECULATIVE},
    }  # fmt: skip


def test_the_first_chunk_has_the_role(server: Server) -> None:
    def chunk(delta: dict[str, Any]) -> dict[str, Any]:
        return {**HEAD, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}

    last = {
        **HEAD,
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "seed": DEFAULT_SEED,
        "metrics": {"speculative_decoding": SPECULATIVE},
    }
    assert kinds(server, messages=HI) == [
        chunk({"role": "assistant", "content": ""}), *(chunk({"content": c}) for c in ECHO), last,
    ]  # fmt: skip


def test_usage_is_the_last_chunk_if_requested(server: Server) -> None:
    chunks = kinds(server, messages=HI, stream_options={"include_usage": True})
    assert chunks[-1] == {
        **HEAD, "choices": [], "usage": usage(8, 8), "seed": DEFAULT_SEED,
        "metrics": {"speculative_decoding": SPECULATIVE},
    }  # fmt: skip
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_mistrals_clients_get_the_usage_with_the_end(server: Server) -> None:
    agent = {"user-agent": "mistral-client-python/3.7.0"}
    data = server.client.post(CHAT, json={"messages": HI, "stream": True}, headers=agent).read()
    *chunks, last, _ = events(data)
    assert (last["choices"][0]["finish_reason"], last["usage"]) == ("length", usage(8, 8))
    assert not any("usage" in chunk for chunk in chunks)


def test_samples(server: Server) -> None:
    answer = server.ask(CHAT, messages=HI, n=2)
    wanted = [ECHO, ECHO[1:] + ECHO[0]]
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == list(enumerate(wanted))
    assert answer["usage"] == usage(8, 16)
    texts, roles = ["", ""], []
    for chunk in kinds(server, messages=HI, n=2):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if "role" in choice["delta"]:
            roles.append(choice["index"])
    assert (texts, roles) == (wanted, [0, 1])


def test_logprobs(server: Server) -> None:
    def token(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    wanted = [{**token(c, -0.5), "top_logprobs": [token(c, -0.5), token("\x01", -1.25)]} for c in ECHO]
    fields = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    assert server.ask(CHAT, **fields)["choices"][0]["logprobs"] == {"content": wanted, "refusal": None}
    chunks = [chunk["choices"][0]["logprobs"] for chunk in kinds(server, **fields)]
    assert chunks == [None, *({"content": [one], "refusal": None} for one in wanted), None]


def test_token_ids(server: Server) -> None:
    answer = server.ask(CHAT, messages=HI, return_token_ids=True)
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([*ECHO.encode()], [*ECHO.encode()])
    chunks = kinds(server, messages=HI, return_token_ids=True, n=2)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[*ECHO.encode()]] + [None] * (len(chunks) - 1)
    ids: list[list[int]] = [[], []]
    for chunk in chunks:
        ids[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
    assert ids == [[*ECHO.encode()], [*(ECHO[1:] + ECHO[0]).encode()]]


TOOLS = [{"type": "function", "function": {"name": "look"}}]
SAID = 'Let me.\n<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def test_tool_calls_are_parsed_from_the_text(server: Server) -> None:
    messages = [{"role": "user", "content": SAID}]  # the fake echoes it
    (choice,) = server.ask(CHAT, messages=messages, tools=TOOLS)["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "[look]user:Let me.;", "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}  # as it was written
    assert choice["finish_reason"] == "length"  # not "tool_calls": the answer was cut off
    chunks = kinds(server, messages=messages, tools=TOOLS, logprobs=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "[look]user:Let me.;"
    begun, *pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "look", "arguments": ""}}
    assert "".join(piece["function"].pop("arguments") for piece in pieces) == '{"at": 1}'
    assert pieces == [{"index": 0, "function": {}}] * len('{"at": 1}')  # the fake writes a character a step
    rows = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(row["content"][0]["token"] for row in rows if row) == f"[look]user:{SAID};"
    for nothing in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = server.ask(CHAT, messages=messages, **nothing)["choices"]
        assert choice["message"]["content"] == f"user:{SAID};"
        assert "tool_calls" not in choice["message"]


def test_a_message_that_is_only_a_call_has_no_content() -> None:
    form = AnswerForm(ToolUse([], ToolForm.HERMES))
    message = message_of(form.parse('<tool_call>{"name": "f"}</tool_call>\n')[0])
    assert message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}
    assert message_of(form.parse("")[0])["content"] == ""


def test_max_completion_tokens_0_only_prefills_the_prompt(server: Server) -> None:
    answer = server.ask(CHAT, messages=HI, max_completion_tokens=0)
    assert (answer["choices"][0]["message"]["content"], answer["usage"]) == ("", usage(8, 0))
