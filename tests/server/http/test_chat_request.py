"""How a body of /v1/chat/completions becomes an engine request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from server.errors import ChatNotSupportedError, UnknownModelError
from server.http.anthropic import parse_messages
from server.http.openai_chat import parse_chat
from server.http.responses import parse_responses
from server.json_body import MAX_OBJECTS
from specdec.core.fields import MAX_TOOLS
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    StoppingParams,
)
from tests.fake_engine import FINGERPRINT
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import asked, make_context, violations

HI = [{"role": "user", "content": "hi"}]
PLAIN = Request("chatcmpl-r", tuple(b"user:hi;"))
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def request(**fields: Any) -> Request:
    """The engine request of a body with the message "hi"."""
    return asked(parse_chat, {"messages": HI, **fields}, {"x-request-id": "r"}).request


def test_a_minimal_body_gets_the_defaults() -> None:
    ask = asked(parse_chat, {"messages": HI}, {"x-request-id": "r"})
    assert (ask.request, ask.form.tools, ask.stream, ask.own["return_token_ids"]) == (PLAIN, None, False, False)
    assert request(unknown=[], user="u", model="fake", store=True, metadata={}, parallel_tool_calls=True) == PLAIN


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 5}, {"stopping": StoppingParams(max_tokens=5)}),
    ({"max_tokens": -1}, {}),
    ({"max_completion_tokens": -1}, {}),
    ({"max_completion_tokens": 0, "max_tokens": 5}, {"stopping": StoppingParams(max_tokens=0)}),
    ({"logprobs": True}, {"output": OutputParams(logprobs=0)}),
    ({"logprobs": True, "top_logprobs": 3}, {"output": OutputParams(logprobs=3)}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"n": 2, "seed": 3, "temperature": 0.5}, {"sampling": SamplingParams(n=2, seed=3, temperature=0.5)}),
    ({"stop": ["a"]}, {"stopping": StoppingParams(stop=("a",))}),
    ({"response_format": {"type": "json_object"}}, {"grammar": GrammarParams(GrammarKind.JSON_OBJECT)}),
    (
        {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
        {"grammar": GrammarParams(GrammarKind.JSON_SCHEMA, '{"type":"array"}')},
    ),
    ({"random_seed": 5}, {"sampling": SamplingParams(seed=5)}),
    ({"prediction": {"type": "content", "content": "ab"}}, {"prediction_ids": tuple(b"ab")}),
    (
        {"resume": {"token_ids": [3, 4], "numeric_fingerprint": FINGERPRINT}, "seed": 3},
        {"resume": ResumeParams((3, 4), None, FINGERPRINT), "sampling": SamplingParams(seed=3)},
    ),
    ({"session": "s", "priority": 3, "cache_salt": "c"}, {"session": "s", "priority": 3, "cache_salt": "c"}),
]


@pytest.mark.parametrize(("fields", "wanted"), CASES)
def test_fields(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert request(**fields) == dataclasses.replace(PLAIN, **wanted)


def test_content_may_be_parts_or_missing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "tool"}]
    assert request(messages=messages).prompt_ids == tuple(b"user:a\nb;assistant:;tool:;")


def test_a_last_message_with_a_prefix_is_continued() -> None:
    begun = {"role": "assistant", "content": "ab", "prefix": True}
    assert request(messages=[*HI, begun]).prompt_ids == tuple(b"user:hi;ab")
    assert request(messages=[*HI, begun | {"prefix": False}]).prompt_ids == tuple(b"user:hi;assistant:ab;")
    assert request(messages=[begun, *HI]).prompt_ids == tuple(b"assistant:ab;user:hi;")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert request(messages=[*HI, begun | {"content": parts}]).prompt_ids == tuple(b"user:hi;a\nb")
    assert request(messages=[*HI, begun | {"content": None}]).prompt_ids == tuple(b"user:hi;")


def test_bug_vllms_fields_continue_the_last_message_or_begin_none() -> None:
    begun = {"role": "assistant", "content": "ab"}
    for beside in ({}, {"add_generation_prompt": False}):  # vLLM's clients send both
        continued = request(messages=[*HI, begun], continue_final_message=True, **beside)
        assert continued.prompt_ids == tuple(b"user:hi;ab")
    assert request(messages=[*HI, begun], continue_final_message=False).prompt_ids == tuple(b"user:hi;assistant:ab;")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for messages in (HI, [*HI, begun | {"tool_calls": [call]}]):
        found = violations(parse_chat, {"messages": messages, "continue_final_message": True})
        assert [each.field for each in found] == ["continue_final_message"]
    assert request(add_generation_prompt=False).prompt_ids == tuple(b"user:hi")  # the fake template's end is missing
    assert request(add_generation_prompt=True) == PLAIN


def test_tools_are_rendered_unless_tool_choice_is_none() -> None:
    for choice, told in ((None, True), ("auto", True), ("none", False)):
        ask = asked(parse_chat, {"messages": HI, "tools": [TOOL], "tool_choice": choice})
        assert (ask.form.tools is not None) is told
        assert bytes(ask.request.prompt_ids) == (b"[look]" if told else b"") + b"user:hi;"
    assert not asked(parse_chat, {"messages": HI, "tools": []}).form.tools


def test_an_effort_is_a_variable_of_the_template() -> None:
    for effort, variables in (
        ("low", "reasoning_effort='low';"),
        ("none", "reasoning_effort='none';enable_thinking=False;"),
    ):
        prompt = asked(parse_chat, {"messages": HI, "reasoning_effort": effort}).request.prompt_ids
        assert bytes(prompt) == f"{variables}user:hi;".encode()


BAD = [
    ("messages", {"messages": None}), ("messages", {"messages": []}), ("messages", {"messages": 5}),
    ("messages", {"messages": ["hi"]}), ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": ""}]}), ("messages[1].role", {"messages": [*HI, {"role": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "text": "hi"}]}),
    ("messages[0].content[1]",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": ""}]}),
    ("tools", {"tools": {}}), ("tools", {"tools": [5]}),
    ("tools[0].function", {"tools": [{}]}), ("tools[0].function.name", {"tools": [{"function": {}}]}),
    ("tools[0].function.name", {"tools": [{"function": {"name": 5}}]}), ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ("logprobs", {"logprobs": 1}), ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}), ("max_completion_tokens", {"max_completion_tokens": -2}),
    ("best_of", {"best_of": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_each_bad_field_is_named(field: str, fields: dict[str, Any]) -> None:
    assert [v.field for v in violations(parse_chat, {"messages": HI, **fields})].count(field) >= 1


def test_bad_messages_do_not_hide_other_bad_fields() -> None:
    found = violations(parse_chat, {"messages": [{"role": 5}], "top_p": 7, "tool_choice": "required"})
    assert {v.field for v in found} == {"messages[0].role", "sampling.top_p", "tool_choice"}


@pytest.mark.parametrize(
    ("reader", "body"),
    [(parse_chat, {"messages": HI}), (parse_messages, {"messages": HI}), (parse_responses, {"input": "hi"})],
)
def test_a_model_without_chat_and_an_unknown_model_are_rejected(reader: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ChatNotSupportedError):
        asked(reader, body, server=make_context(FakeTokenizer(has_chat=False)))
    with pytest.raises(UnknownModelError):
        asked(reader, {**body, "model": "other"})


def test_deep_messages_do_not_exhaust_the_stack() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    for fields in ({"messages": [{"role": "user", "content": "x", "more": deep}]}, {"tools": [{**TOOL, "x": deep}]}):
        assert "nested" in violations(parse_chat, {"messages": HI, **fields})[0].description


def test_too_many_messages_are_rejected_before_parsing() -> None:
    found = violations(parse_chat, {"messages": [{"role": "user", "content": "x"}] * (MAX_OBJECTS + 1)})
    assert [(v.field, v.description) for v in found] == [
        ("messages", "holds 8193 values, at most 8192 may be; send fewer")
    ]


def test_too_many_tools_are_rejected_before_parsing() -> None:
    found = violations(parse_chat, {"messages": HI, "tools": [TOOL] * (MAX_TOOLS + 1), "tool_choice": "required"})
    assert ("tools", "holds 1025 values, at most 1024 may be; send fewer") in [(v.field, v.description) for v in found]


def test_a_conversation_with_tools_is_not_resumed() -> None:
    resume = {"token_ids": [3], "numeric_fingerprint": FINGERPRINT}
    found = violations(parse_chat, {"messages": HI, "tools": [TOOL], "seed": 1, "resume": resume})
    assert [violation.field for violation in found] == ["resume"]
