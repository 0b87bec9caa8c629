"""How a body of /v1/messages becomes an engine request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from server.http.anthropic import parse_messages
from specdec.core.types import GrammarKind, GrammarParams, Request, SamplingParams, SpeculationParams, StoppingParams
from tests.server.http.calls import Told, asked, make_context, violations

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
PLAIN = Request("", tuple(b"user:hi;"))


def request(**fields: Any) -> Request:
    found = asked(parse_messages, {"messages": HI, **fields}).request
    assert found.request_id.startswith("msg_")
    return dataclasses.replace(found, request_id="")


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_tokens": 5, "stop_sequences": ["a", "b"]}, {"stopping": StoppingParams(max_tokens=5, stop=("a", "b"))}),
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3},
     {"sampling": SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=3)}),
    ({"output_format": {"type": "json_schema", "schema": {"type": "array"}}},
     {"grammar": GrammarParams(GrammarKind.JSON_SCHEMA, '{"type":"array"}')}),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}},
     {"grammar": GrammarParams(GrammarKind.JSON_SCHEMA, '{"type":"object"}')}),
    ({"session": "s", "priority": 3, "cache_salt": "c"}, {"session": "s", "priority": 3, "cache_salt": "c"}),
    ({"speculation": {"max_depth": 2}}, {"speculation": SpeculationParams(max_depth=2)}),
    ({"prediction": {"type": "content", "content": "ab"}}, {"prediction_ids": tuple(b"ab")}),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto", "n": 3}, {}),
    ({"thinking": {"type": "adaptive"}}, {}),
    ({"thinking": {"type": "disabled"}}, {"prompt_ids": tuple(b"enable_thinking=False;user:hi;")}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), CASES)
def test_fields(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert request(**fields) == dataclasses.replace(PLAIN, **wanted)


def encoded(**fields: Any) -> Told:
    tokenizer = Told()
    asked(parse_messages, {"messages": HI, **fields}, server=make_context(tokenizer))
    return tokenizer


def test_a_conversation_with_tools() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    found = encoded(
        system=[{"type": "text", "text": "Be", **cached}, {"type": "text", "text": "brief."}],
        messages=[
            {"role": "user", "content": [
                {"type": "text", "text": "Where?"}, {"type": "text", "text": "Look.", **cached},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1]}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a wall"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
                 "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "Well?"},
            ]},
            {"role": "user", "content": "Say."},
        ],
        tools=[TOOL],
    )  # fmt: skip
    assert found.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Where?\nLook."},
        {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":[1]}'}},
            {"id": "t2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": "a wall"},
        {"role": "tool", "tool_call_id": "t2", "content": "no"},
        {"role": "user", "content": "Well?\nSay."},
    ]  # fmt: skip
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}]


def test_documents_of_plain_text_are_read() -> None:
    def document(**source: Any) -> dict[str, Any]:
        return {"type": "document", "source": source, "title": "Skies", "context": None}

    plain = document(type="text", media_type="text/plain", data="Green.")
    parts = document(type="content", content=[{"type": "text", "text": "Blue"}, {"type": "text", "text": "sky."}])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [plain, {"type": "text", "text": "End."}]}
    assert encoded(messages=[{"role": "user", "content": [result, parts]}]).messages == [
        {"role": "tool", "tool_call_id": "t", "content": "Skies\nGreen.\nEnd."},
        {"role": "user", "content": "Skies\nBlue\nsky."},
    ]


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_system_prompt_is_none(empty: Any) -> None:
    assert encoded(system=empty).messages == HI


def test_tool_choice() -> None:
    for choice in (None, {"type": "auto"}):
        assert asked(parse_messages, {"messages": HI, "tools": [TOOL], "tool_choice": choice}).form.tools
    assert encoded(tools=[TOOL], tool_choice={"type": "none"}).tools is None


def test_tool_choice_that_forces_a_call() -> None:
    def choice(**choice: Any) -> Any:
        other = {**TOOL, "name": "touch"}
        return asked(parse_messages, {"messages": HI, "tools": [TOOL, other], "tool_choice": choice})

    free, forced, named = choice(type="auto"), choice(type="any"), choice(type="tool", name="touch")
    assert (free.form.tools.required, forced.form.tools.required, named.form.tools.required) == (
        (),
        ("look", "touch"),
        ("touch",),
    )
    assert free.request.grammar is None
    assert "look" in forced.request.grammar.text
    assert "look" not in named.request.grammar.text
    assert free.form.tools.parallel
    assert not choice(type="auto", disable_parallel_tool_use=True).form.tools.parallel


def test_assistant_prefill_is_continued() -> None:
    begun = [*HI, {"role": "assistant", "content": "So "}, {"role": "assistant", "content": "what"}]
    assert request(messages=begun).prompt_ids == tuple(b"user:hi;So \nwhat")


def test_an_assistant_prefill_after_an_unanswered_call_is_rejected() -> None:
    found = encoded(
        messages=[*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]
    )
    assert [message["role"] for message in found.messages] == ["user", "assistant"]


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


DEEP: Any = {}
for _ in range(80):
    DEEP = {"a": DEEP}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}), ("messages", {"messages": []}), ("messages", {"messages": 5}),
    ("messages", {"messages": ["hi"]}), ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("messages[0].content[0].type", turn("user", {"text": "x"})),
    ("messages[0].content[0].type", turn("user", {"type": "image", "source": {}})),
    ("messages[0].content[0].type", turn("assistant", {"type": "tool_result", "tool_use_id": "t"})),
    ("messages[0].content[0].type", turn("assistant", {"type": "document", "source": {"type": "text", "data": "x"}})),
    ("messages[0].content[0].source", turn("user", {"type": "document"})),
    ("messages[0].content[0].source", turn("user", {"type": "document", "source": {"type": "base64", "data": "x"}})),
    ("messages[0].content[0].source.data", turn("user", {"type": "document", "source": {"type": "text"}})),
    ("messages[0].content[0].type", turn("user", {"type": "tool_use", "id": "t", "name": "f", "input": {}})),
    ("messages[0].content[1].text", turn("user", {"type": "text", "text": "x"}, {"type": "text"})),
    ("messages[0].content[0].tool_use_id", turn("user", {"type": "tool_result"})),
    ("messages[0].content[0].content[0].type",
     turn("user", {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})),
    ("messages[0].content[0].id", turn("assistant", {"type": "tool_use", "name": "f", "input": {}})),
    ("messages[0].content[0].name", turn("assistant", {"type": "tool_use", "id": "t", "input": {}})),
    ("messages[0].content[0].input", turn("assistant", {"type": "tool_use", "id": "t", "name": "f"})),
    ("messages[0].content[0].input", turn("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": "x"})),
    ("messages", turn("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": DEEP})),
    ("system", {"system": 5}), ("system[0].type", {"system": [{"type": "image"}]}),
    ("tools", {"tools": {}}), ("tools", {"tools": [5]}), ("tools[0].name", {"tools": [{}]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": 5}]}),
    ("tools[0].input_schema", {"tools": [{**TOOL, "input_schema": 5}]}),
    ("tools[0].type", {"tools": [{**TOOL, "type": 5}]}),
    ("tools", {"tools": [{**TOOL, "input_schema": DEEP}]}),
    ("tool_choice", {"tool_choice": "auto"}), ("tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "touch"}}),
    ("tool_choice", {"tool_choice": {"type": "any"}}), ("tools[1].name", {"tools": [TOOL, TOOL]}),
    ("tools[0].name", {"tools": [{**TOOL, "name": "a b"}]}),
    ("tools[0].input_schema.type", {"tools": [{**TOOL, "input_schema": {"type": "string"}}]}),
    ("max_tokens", {"max_tokens": "5"}), ("stop_sequences", {"stop_sequences": [5]}),
    ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ("stream", {"stream": "yes"}), ("speculation.width", {"speculation": {"width": "x"}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_each_bad_field_is_named(field: str, fields: dict[str, Any]) -> None:
    assert [v.field for v in violations(parse_messages, {"messages": HI, **fields})].count(field) >= 1


def test_bad_messages_do_not_hide_other_bad_fields() -> None:
    found = violations(parse_messages, {"messages": [{"role": 5}], "top_p": 7, "stop_sequences": ["a"] * 3 + ["b", 5]})
    assert {v.field for v in found} == {"messages[0].role", "sampling.top_p", "stop_sequences"}
