"""How a body of /v1/responses becomes an engine request."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from server.http.responses import parse_responses
from specdec.core.types import GrammarKind, GrammarParams, OutputParams, Request, SamplingParams, StoppingParams
from tests.server.http.calls import Told, asked, make_context, violations

TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
PLAIN = Request("", tuple(b"user:hi;"))


def request(**fields: Any) -> Request:
    found = asked(parse_responses, {"input": "hi", **fields}).request
    assert found.request_id.startswith("resp_")
    return dataclasses.replace(found, request_id="")


SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_output_tokens": 5}, {"stopping": StoppingParams(max_tokens=5)}),
    ({"temperature": 0.5, "top_p": 0.9, "seed": 3}, {"sampling": SamplingParams(temperature=0.5, top_p=0.9, seed=3)}),
    ({"text": {"format": SCHEMA}}, {"grammar": GrammarParams(GrammarKind.JSON_SCHEMA, '{"type":"object"}')}),
    ({"text": {"format": {"type": "json_object"}}}, {"grammar": GrammarParams(GrammarKind.JSON_OBJECT)}),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"output": OutputParams(logprobs=3)}),
    ({"include": ["reasoning.encrypted_content"], "store": False, "reasoning": {"summary": "auto"}}, {}),
    ({"reasoning": {"effort": "low"}}, {"prompt_ids": tuple(b"reasoning_effort='low';user:hi;")}),
    ({"reasoning": {"effort": "none"}},
     {"prompt_ids": tuple(b"reasoning_effort='none';enable_thinking=False;user:hi;")}),
    ({"session": "s", "priority": 3, "cache_salt": "c"}, {"session": "s", "priority": 3, "cache_salt": "c"}),
    ({"prediction": {"type": "content", "content": "ab"}}, {"prediction_ids": tuple(b"ab")}),
    ({"previous_response_id": None, "conversation": None, "background": False, "truncation": "disabled"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), CASES)
def test_fields(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert request(**fields) == dataclasses.replace(PLAIN, **wanted)


def encoded(**fields: Any) -> Told:
    tokenizer = Told()
    asked(parse_responses, {"input": "hi", **fields}, server=make_context(tokenizer))
    return tokenizer


def test_a_conversation_with_tools() -> None:
    answered = {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}
    found = encoded(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [answered]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a wall"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
            {"role": "user", "content": "Well?"},
        ],
        tools=[TOOL],
    )
    assert found.messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "So.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "a wall"},
        {"role": "tool", "tool_call_id": "c2", "content": "no"},
        {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
    assert found.tools == [{"type": "function", "function": function}]
    assert encoded(tools=[TOOL], tool_choice="none").tools is None


def test_tool_choice_that_forces_a_call() -> None:
    def choice(choice: Any, **fields: Any) -> Any:
        other = {**TOOL, "name": "touch"}
        return asked(parse_responses, {"input": "hi", "tools": [TOOL, other], "tool_choice": choice, **fields})

    free, forced, named = choice("auto"), choice("required"), choice({"type": "function", "name": "touch"})
    assert (free.form.tools.required, forced.form.tools.required, named.form.tools.required) == (
        (),
        ("look", "touch"),
        ("touch",),
    )
    assert "[lazy]" in free.request.grammar.text  # the tools are strict
    loose = asked(parse_responses, {"input": "hi", "tools": [{**TOOL, "strict": False}]})
    assert loose.request.grammar is None
    assert "look" in forced.request.grammar.text
    assert "look" not in named.request.grammar.text
    assert not choice("auto", parallel_tool_calls=False).form.tools.parallel


def test_allowed_tools_are_the_only_ones() -> None:
    def choice(mode: str) -> Any:
        tools = [{"type": "function", "name": "touch"}, {"type": "mcp", "server_label": "s"}]
        given = {"type": "allowed_tools", "mode": mode, "tools": tools}
        listed = [{**TOOL, "strict": False}, {**TOOL, "name": "touch", "strict": False}]
        return asked(parse_responses, {"input": "hi", "tools": listed, "tool_choice": given})

    free, forced = choice("auto"), choice("required")
    assert (
        [tool["function"]["name"] for tool in free.form.tools.tools],
        free.form.tools.required,
        free.form.tools.parallel,
    ) == (
        ["touch"],
        (),
        True,
    )
    assert ([tool["function"]["name"] for tool in forced.form.tools.tools], forced.form.tools.required) == (
        ["touch"],
        ("touch",),
    )
    echoed = json.loads(free.last().partition(b"data: ")[2])["response"]
    assert echoed["tool_choice"]["type"] == "allowed_tools"


def test_the_refusal_of_a_reference_has_the_way_out() -> None:
    """Vercel's AI SDK refers to earlier answers unless its `store` is false."""
    (found,) = violations(parse_responses, {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert "store: false" in found.description


DEEP: Any = {}
for _ in range(80):
    DEEP = {"a": DEEP}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
LOGPROBS = ["message.output_text.logprobs"]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}), ("input", {"input": []}), ("input", {"input": 5}), ("input", {"input": ["hi"]}),
    ("input", {"input": [DEEP]}), ("input[0].role", {"input": [{"content": "x"}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}), ("input[0].type", {"input": [{"type": 5}]}),
    ("input[0].type", {"input": [{"type": "web_search_call"}]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content", {"input": [{"role": "user", "content": 5}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input[0].call_id", {"input": [{**CALL, "call_id": None}]}), ("input[0].name", {"input": [{**CALL, "name": 5}]}),
    ("input[0].arguments", {"input": [{**CALL, "arguments": {}}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("instructions", {"instructions": 5}), ("tools", {"tools": {}}), ("tools", {"tools": [5]}),
    ("tools[0].type", {"tools": [{"type": 5}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].parameters", {"tools": [{**TOOL, "parameters": 5}]}),
    ("tools", {"tools": [{**TOOL, "parameters": DEEP}]}), ("tools[0].strict", {"tools": [{**TOOL, "strict": 1}]}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "always"}),
    ("tool_choice", {"tool_choice": "required"}), ("tools[1].name", {"tools": [TOOL, TOOL]}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "web_search"}}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "touch"}}),
    ("tool_choice.tools", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}),
    ("tool_choice.tools[0].name",
     {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "touch"}]}}),
    ("tool_choice.mode",
     {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "look"}]}}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}), ("max_output_tokens", {"max_output_tokens": -2}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}), ("text", {"text": "json"}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema"}}}), ("metadata", {"metadata": DEEP}),
    ("metadata", {"metadata": "x"}),
    ("top_logprobs", {"top_logprobs": 2}), ("top_logprobs", {"include": LOGPROBS, "top_logprobs": 21}),
    ("include", {"include": LOGPROBS, "tools": [TOOL]}), ("include", {"include": [5]}), ("user", {"user": 5}),
    ("previous_response_id", {"previous_response_id": "resp_1"}), ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}), ("background", {"background": True}),
    ("truncation", {"truncation": 5}), ("text", {"text": {"more": [DEEP]}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look", "more": [DEEP]}}),
    ("store", {"store": "yes"}), ("stream", {"stream": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_each_bad_field_is_named(field: str, fields: dict[str, Any]) -> None:
    assert [v.field for v in violations(parse_responses, {"input": "hi", **fields})].count(field) >= 1


def test_a_repeated_tool_is_named_by_its_place_in_the_body() -> None:
    tools = [{"type": "web_search"}, TOOL, TOOL]
    (found,) = violations(parse_responses, {"input": "hi", "tools": tools})
    assert (found.field, found.description) == ("tools[2].name", f"{TOOL['name']} is the name of tools[1] too")
