"""Formats of tool calls, detected from the chat template. Without one, a message describes the tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.models.tool_forms import ToolForm, tool_form, without_tools

LISTED = "{% if tools %}{{ tools | tojson }}{% endif %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}


@pytest.mark.parametrize(
    ("rest", "form"),
    [
        ("<tool_call>{{ call | tojson }}</tool_call>", ToolForm.HERMES),
        ("{{ '<|python_tag|>' }}", ToolForm.LLAMA),
        ('ipython {"name": function name, "parameters": its arguments}', ToolForm.LLAMA),
        ('{"name": "{{ tool.name }}", "parameters": {{ tool.parameters | tojson }}}', None),
        ("[TOOL_CALLS]{{ calls }}", ToolForm.MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", ToolForm.MISTRAL_ARGS),
        ("{{ '>>>' + name }}<tool_call>", None),
        ("<function=example>{}</function><|python_tag|>", None),
        ("<tool_call><function=example><parameter=at>1</parameter></function></tool_call>", ToolForm.QWEN_XML),
        ("<seed:tool_call><function=example><parameter=at>1</parameter></function></seed:tool_call>", None),
        ("<tool_call>f\n<arg_key>at</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", None),
        ("tools are told, and no call is known", None),
    ],
)
def test_tool_call_formats(rest: str, form: ToolForm | None) -> None:
    assert tool_form(LISTED + rest) is form
    assert tool_form(rest.replace("tools", "")) is None


def test_tools_are_described_in_the_system_message() -> None:
    for before in ([], [{"role": "system", "content": "Be brief."}]):
        system, user = without_tools([*before, {"role": "user", "content": "hi"}], [TOOL])
        assert system["role"] == "system"
        assert system["content"].startswith("Be brief.\n\n" if before else "You can call")
        assert json.dumps(TOOL["function"]) in system["content"]
        assert user == {"role": "user", "content": "hi"}


def test_what_the_user_says_after_a_result_is_in_its_message() -> None:
    said = [{"role": "user", "content": text} for text in "xy"]
    assert without_tools([{"role": "tool", "content": "a"}, *said], None) == [
        {"role": "user", "content": "<tool_response>\na\n</tool_response>\nx"},
        said[1],
    ]


def test_calls_and_results_are_text() -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        {"role": "tool", "tool_call_id": "2", "content": "b"},
        {"role": "assistant", "content": "So."},
    ]
    written = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    assert without_tools(talk, None) == [
        talk[0],
        {"role": "assistant", "content": f"Well.\n{written}\n{written}"},
        {"role": "user", "content": "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"},
        talk[4],
    ]
    assert talk[1]["tool_calls"] == [CALL, CALL]  # as it was
    quoted = [{"role": "user", "content": "What is </tool_response>"}, {"role": "tool", "content": "a"}]
    assert [message["content"] for message in without_tools(quoted, None)] == [
        "What is </tool_response>", "<tool_response>\na\n</tool_response>",
    ]  # fmt: skip
    assert without_tools([{"role": "assistant", "content": "", "tool_calls": ["x"]}], []) == [
        {"role": "assistant", "content": ""}
    ]
