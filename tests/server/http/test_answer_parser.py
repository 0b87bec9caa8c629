"""Tool calls come out of a text however it is cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.http.answer_parser import (
    AnswerParser,
    CallArguments,
    CallEnd,
    Part,
    Thought,
    ThoughtMarks,
    ToolCall,
)
from server.http.tool_parameters import MAX_NAME
from specdec.models.tool_forms import ToolForm

PLACE = {"properties": {"at": {"type": ["integer", "string"]}, "a": {"type": "string"}}}
TOOLS: dict[str, Any] = {"look": PLACE, "find": {}}
HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "é</tool"}}\n</tool_call>'
LISTED = '[TOOL_CALLS] [{"name": "look", "arguments": {"at": [1, "]"]}}, {"name": "find", "arguments": {}}]'
XML = "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call>"
TAGS = "<function=look><parameter=a>\n</parameter> <\n</parameter>\n<parameter=at>é</parameter></function>"
WRITTEN = {
    ToolForm.HERMES: (HERMES, "<tool_call>", "</tool_call>"),
    ToolForm.LLAMA: ('{"name": "look", "parameters": {"at": "}"}}', "<|python_tag|>", ";"),
    ToolForm.MISTRAL: (LISTED, "[TOOL_CALLS]", "["),
    ToolForm.MISTRAL_ARGS: ('[TOOL_CALLS]look[ARGS]{"at": 1}', "[TOOL_CALLS]find", "[CALL_ID]1"),
    ToolForm.QWEN_XML: (XML, TAGS, "</parameter>", "<parameter=a>", "</function>", "<function=look>"),
}
FORMS = st.sampled_from(list(ToolForm))
Out = str | tuple[str, str]


@st.composite
def written(draw: st.DrawFn) -> tuple[ToolForm, str]:
    """Calls of a form, pieces of such, and text, one after another."""
    form = draw(FORMS)
    pieces = [
        '{"name":"look"}',
        '{"name": "find", "id": 1, "arguments": {"a": "\\"',
        "{",
        "}",
        "a",
        " ",
        "\n",
        "<",
        '"',
        "```json\n",
    ]
    return form, "".join(draw(st.lists(st.sampled_from([*WRITTEN[form] * 2, *pieces]), max_size=8)))


CUTS = st.lists(st.integers(0, 200), max_size=8)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(marks)]


def streamed(form: ToolForm, text: str, cuts: Sequence[int]) -> list[Part]:
    """Everything that comes out."""
    parser = AnswerParser(form, TOOLS)
    found = [part for piece in pieces_of(text, cuts) for part in parser.push(piece)] + parser.flush()
    assert parser.calls == sum(isinstance(part, ToolCall) for part in found)
    return found


def folded(parts: Sequence[Part]) -> list[Out]:
    """Texts joined, calls by name and arguments, incomplete ones by their text."""
    out: list[Out] = []
    name = arguments = ""
    for part in parts:
        if isinstance(part, ToolCall):
            name, arguments = part.name, ""
        elif isinstance(part, CallArguments):
            arguments += part.text
        elif isinstance(part, CallEnd) and part.is_whole:
            out.append((name, arguments))
        else:
            text = part.raw if isinstance(part, CallEnd) else part
            out[-1:] = [out[-1] + text] if out and isinstance(out[-1], str) else [*out[-1:], text]
    return out


def whole(form: ToolForm, text: str, cuts: Sequence[int] = ()) -> list[Out]:
    """The same of whole calls."""
    parser, out = AnswerParser(form, TOOLS, whole=True), list[Out]()
    for part in [part for piece in pieces_of(text, cuts) for part in parser.push(piece)] + parser.flush():
        if isinstance(part, ToolCall):
            out.append((part.name, part.arguments))
        else:
            out[-1:] = [out[-1] + part] if out and isinstance(out[-1], str) else [*out[-1:], part]
    assert parser.whole_calls == sum(isinstance(part, tuple) for part in out)
    return out


@given(case=written(), cuts=CUTS)
@example(case=(ToolForm.HERMES, HERMES), cuts=[])
@example(case=(ToolForm.HERMES, '<tool_call>{"id": 12{<tool_call>{"name": "look"}</tool_call>'), cuts=[])
@example(case=(ToolForm.MISTRAL, LISTED), cuts=[])
def test_splitting_the_text_changes_nothing(case: tuple[ToolForm, str], cuts: list[int]) -> None:
    form, text = case
    at_once = folded(streamed(form, text, []))
    assert folded(streamed(form, text, cuts)) == at_once
    assert folded(streamed(form, text, range(len(text)))) == at_once
    assert whole(form, text, cuts) == at_once


@given(case=written(), cuts=CUTS)
def test_text_without_calls_is_unchanged(case: tuple[ToolForm, str], cuts: list[int]) -> None:
    form, text = case
    found = whole(form, text, cuts)
    if "all\n" not in text and not any(isinstance(part, tuple) for part in found):
        assert "".join(part for part in found if isinstance(part, str)) == text


@given(case=written())
def test_a_call_is_delimited_by_its_markers(case: tuple[ToolForm, str]) -> None:
    opened: ToolCall | None = None
    count = 0
    for part in streamed(*case, cuts=range(200)):
        if isinstance(part, ToolCall):
            assert opened is None
            assert part.index == count
            opened, count = part, count + 1
        elif isinstance(part, str):
            assert opened is None
        else:
            assert opened is not None
            assert part.index == opened.index
            if isinstance(part, CallEnd):
                opened = None
    assert opened is None


LOOK, NONE = ("look", {"at": 1}), ("look", {})
CASES: list[tuple[ToolForm, str, list[object]]] = [
    (ToolForm.HERMES, HERMES, [("look", {"at": "é</tool"})]),
    (ToolForm.HERMES, f"Well.\n\n{HERMES}\n{HERMES}\n", ["Well.", *[("look", {"at": "é</tool"})] * 2]),
    (ToolForm.HERMES, '<tool_call>{"name": "f"}', [("f", {})]),  # the answer ended instead of the tag
    *[(ToolForm.HERMES, HERMES[:-cut], [("look", {"at": "é</tool"})]) for cut in range(1, 13)],  # or within it
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("f", {})]),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
    (ToolForm.HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>x', [("f", {"a": 1}), "x"]),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', [("f", {"a": "</tool_call>"})]),
    (
        ToolForm.HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "\\"}", "b": "\\\\"}}',
        [("f", {"a": '"}', "b": "\\"})],
    ),
    (ToolForm.HERMES, 'a <tool_call>{"name": 5}</tool_call> b', ['a <tool_call>{"name": 5}</tool_call> b']),
    (ToolForm.HERMES, "Write <tool_call> first", ["Write <tool_call> first"]),
    (ToolForm.HERMES, '<tool_call>{"name": "f", ', ['<tool_call>{"name": "f", ']),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {"a', ['<tool_call>{"name": "f", "arguments": {"a']),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {a}}', ['<tool_call>{"name": "f", "arguments": {a}}']),
    (ToolForm.HERMES, "", []),
    # wrapped slightly wrong, as small models do
    (ToolForm.HERMES, '<tool_call>\n{{"name": "f", "arguments": {"a": 1}}}\n</tool_call>x', [("f", {"a": 1}), "x"]),
    (ToolForm.HERMES, '<tool_call>{{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    (ToolForm.HERMES, '<tool_call>\n```json\n{"name": "f"}\n```\n</tool_call>', [("f", {})]),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>x', [("f", {"a": 1}), "x"]),
    (ToolForm.HERMES, '```json\n{\n  "name": "look",\n  "arguments": {"at": 1}\n}\n```', [LOOK]),
    (ToolForm.HERMES, '```\n{"name": "look", "arguments": {"at": 1}\n```\n{"name": "look"}</tool_call>', [LOOK, NONE]),
    (ToolForm.HERMES, '{"name": "look", "arguments": {"at": 1}', [LOOK]),
    *[
        (ToolForm.HERMES, text, [text])  # an answer, or not surely a call
        for text in (
            'Write this:\n```json\n{"name": "look", "arguments": {"at": 1}}\n```',
            'So {"name": "look", "arguments": {"at": 1}}',
            '```json\n{"name": "Ann", "arguments": {"at": 1}}\n```',
            '```json\n{"name": "look", "age": 5}\n```',
            "```python\nlook(at=1)\n```",
            '{"name": "look", "arguments": {"at": 1',
            '<tool_call>{"name": "f"</tool_call>',
        )
    ],
    (ToolForm.LLAMA, '{"name": "look", "parameters": {"at": 1}}', [LOOK]),
    (ToolForm.LLAMA, '\n<|python_tag|>{"type": "function", "name": "look", "parameters": {"at": 1}}', [LOOK]),
    (ToolForm.LLAMA, '{"name": "look", "parameters": {"at": 1}}; {"name": "look"}\n', [LOOK, NONE]),
    (ToolForm.LLAMA, 'So:\n<|python_tag|>{"name": "look"}<|python_tag|>{"name": "look"}', ["So:", NONE, NONE]),
    (ToolForm.LLAMA, '{"name": "Ann", "parameters": {}}', ['{"name": "Ann", "parameters": {}}']),  # no tool: an answer
    (ToolForm.LLAMA, '{"age": 5, "name": "look"}', ['{"age": 5, "name": "look"}']),
    (ToolForm.LLAMA, 'A {"name": "look"}', ['A {"name": "look"}']),
    (ToolForm.MISTRAL, LISTED, [("look", {"at": [1, "]"]}), ("find", {})]),
    (ToolForm.MISTRAL, '[TOOL_CALLS]{"name": "look"}', [NONE]),
    (ToolForm.MISTRAL, "A list [1] [TOOL", ["A list [1] [TOOL"]),
    (ToolForm.MISTRAL_ARGS, 'Ok.[TOOL_CALLS]look[ARGS]{"at": 1}[TOOL_CALLS]look{}', ["Ok.", LOOK, NONE]),
    (ToolForm.MISTRAL_ARGS, '[TOOL_CALLS]look[CALL_ID]abc123DEF[ARGS]{"at": 1}', [LOOK]),
    (ToolForm.MISTRAL_ARGS, "[TOOL_CALLS]look at this", ["[TOOL_CALLS]look at this"]),
    (ToolForm.MISTRAL_ARGS, "[TOOL_CALLS]look[ARGS]5 ", ["[TOOL_CALLS]look[ARGS]5 "]),
    (ToolForm.QWEN_XML, f"Well.\n\n{XML}\n{XML}\n", ["Well.", LOOK, LOOK]),
    (ToolForm.QWEN_XML, XML.replace("</function>\n", "") + f"\n{XML}", [LOOK, LOOK]),  # the first has no end of its own
    *[(ToolForm.QWEN_XML, XML[:-cut], [LOOK]) for cut in range(1, 13)],  # the answer ended instead of the tag, or in it
    (ToolForm.QWEN_XML, f'{{"code": "{TAGS}"}}', [f'{{"code": "{TAGS}"}}']),  # quoted
    (ToolForm.QWEN_XML, f"So: {TAGS}", [f"So: {TAGS}"]),
    (ToolForm.QWEN_XML, f"So:\n{TAGS}", ["So:", ("look", {"a": "</parameter> <", "at": "é"})]),  # no mark, no newlines
    (ToolForm.QWEN_XML, "<function=find></function>\n</tool_call> x", [("find", {}), " x"]),
    (ToolForm.QWEN_XML, "<tool_call><function=f></function></tool_call>", [("f", {})]),
    *[
        (ToolForm.QWEN_XML, text, [text])  # an answer, or a call cut off
        for text in (
            "Write <function=look> first, then <parameter=a>.",
            "<function=other>\n<parameter=a>\n1\n</parameter>\n</function>",
            "<tool_call>\n<function=look>\nat=1\n</function>\n</tool_call>",
            '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
            "<tool_call>\n<function=look>\n<parameter=>\n1\n</parameter>\n</function>",
            f"<tool_call>\n<function=look>\n<parameter={'a' * 257}>\n1\n</parameter>\n</function>",
            "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n",
            "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n<para",
            "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n<parameter=at>\n2\n</par",
        )
    ],
]


@pytest.mark.parametrize(("form", "text", "wanted"), CASES)
def test_calls(form: ToolForm, text: str, wanted: list[object]) -> None:
    found = [part if isinstance(part, str) else (part[0], json.loads(part[1])) for part in whole(form, text)]
    assert found == wanted


def test_text_is_not_delayed_longer_than_needed() -> None:
    parser = AnswerParser(ToolForm.HERMES, TOOLS)
    assert parser.push("Hello ") == ["Hello"]
    assert parser.push("there<tool") == [" there"]
    assert parser.push("box>") == ["<toolbox>"]
    assert parser.push(" <tool_call>x") == [" <tool_call>", "x"]
    named = AnswerParser(ToolForm.LLAMA, TOOLS)
    assert named.push('{"city') == []
    assert named.push('": ') == ['{"city"', ":"]
    assert named.push("5") == [" 5"]


def test_text_too_long_for_a_name_is_emitted_immediately() -> None:
    parser, mark = AnswerParser(ToolForm.MISTRAL_ARGS, TOOLS), "[TOOL_CALLS]"
    assert parser.push(mark + "a" * MAX_NAME) == []
    assert parser.push("a") == [mark + "a" * MAX_NAME, "a"]
    assert parser.push("a") == ["a"]
    call = '[TOOL_CALLS]look[ARGS]{"at": 1}'
    assert streamed(ToolForm.MISTRAL_ARGS, "[TOOL_CALLS]" + "a" * 300 + call, [])[-1] == CallEnd(0, call, True)


def test_arguments_are_streamed() -> None:
    parser = AnswerParser(ToolForm.HERMES, TOOLS)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    begin, first = parser.push('{"a')
    assert isinstance(begin, ToolCall)
    assert (begin.name, first) == ("f", CallArguments(0, '{"a'))
    assert parser.push('": "x') == [CallArguments(0, '": "x')]
    assert parser.push('"}') == [CallArguments(0, '"}')]
    (end,) = parser.push("}")
    assert end == CallEnd(0, '<tool_call>{"name": "f", "arguments": {"a": "x"}}', True)
    assert parser.push("\n</tool_call>") == []
    (second, *_) = parser.push('<tool_call>{"name": "g"}')
    assert isinstance(second, ToolCall)
    assert (second.index, second.name) == (1, "g")
    assert second.call_id != begin.call_id


def test_a_long_string_is_streamed_as_json() -> None:
    parser = AnswerParser(ToolForm.QWEN_XML, TOOLS)
    assert parser.push("<tool_call>\n<function=look>\n<parameter=") == []
    begin, *first = parser.push('a>\n def f():\n    return "')
    assert isinstance(begin, ToolCall)
    assert first == [CallArguments(0, '{"a": '), CallArguments(0, '" def f():\\n    return \\"')]
    assert parser.push("</p>\n") == [CallArguments(0, "</p>")]
    assert parser.push("</parameter>") == []  # whether the value ends shows in what follows
    assert parser.push("\n\n") == []
    assert parser.push("x") == [CallArguments(0, "\\n</parameter>"), CallArguments(0, "\\n\\nx")]
    assert parser.push("\n</parameter>\n<parameter=at>\n12") == [CallArguments(0, '"'), CallArguments(0, ', "at": ')]
    end, close, last = parser.push("\n</parameter>\n</function>")
    assert (end, close) == (CallArguments(0, "12"), CallArguments(0, "}"))
    assert isinstance(last, CallEnd)
    assert last.is_whole


def test_a_truncated_call_is_reported() -> None:
    parser = AnswerParser(ToolForm.MISTRAL_ARGS, TOOLS)
    begin, piece = parser.push('[TOOL_CALLS]look[ARGS]{"a": ')
    assert isinstance(begin, ToolCall)
    assert re.fullmatch("[0-9a-zA-Z]{9}", begin.call_id)  # Mistral's templates refuse others
    assert piece == CallArguments(0, '{"a": ')
    assert parser.flush() == [CallEnd(0, '[TOOL_CALLS]look[ARGS]{"a": ', False)]


def test_calls_are_limited_in_number() -> None:
    parser = AnswerParser(ToolForm.HERMES, TOOLS, max_calls=1, whole=True)
    found = [*parser.push(f"Well.{HERMES}{HERMES} More."), *parser.flush()]
    assert [part if isinstance(part, str) else part.name for part in found] == ["Well.", "look"]


def test_deeply_nested_arguments_are_text() -> None:
    deep = '<tool_call>{"name":"f","arguments":' + '{"a":' * 500 + "1" + "}" * 501 + "</tool_call>"
    assert whole(ToolForm.HERMES, deep) == [deep]


MARKS = (ThoughtMarks("<think>", "</think>", 0, are_open=False), ThoughtMarks("<think>", "</think>", 0, are_open=True))
THOUGHTFUL = ["<think>", "</think>", *'{"name": "look"}', "<tool_call>", "</", " ", "\n", "a"]


@given(
    form=st.sampled_from([None, *ToolForm]),
    marks=st.sampled_from(MARKS),
    text=st.lists(st.sampled_from(THOUGHTFUL), max_size=12).map("".join),
    cuts=CUTS,
)
@example(form=None, marks=MARKS[0], text=" <think>a\n</think>\n\na</think>", cuts=[3, 9])
@example(form=ToolForm.HERMES, marks=MARKS[1], text="<tool_call></think><tool_call>", cuts=[2, 9])
def test_thoughts_stand_before_the_answer(
    form: ToolForm | None, marks: ThoughtMarks, text: str, cuts: list[int]
) -> None:
    """As if a regular expression had cut them off the whole text; the rest is read as without thoughts."""
    opening = "" if marks.are_open else r"\s*<think>"
    found = re.fullmatch(rf"{opening}\s*(.*?)(\s*</think>\s*(.*))?", text, re.DOTALL)
    thoughts, answer = (found[1].rstrip(), found[3] or "") if found else ("", text)

    def read(text: str, cuts: Sequence[int], marks: ThoughtMarks | None) -> tuple[str, list[Out]]:
        parser = AnswerParser(form, TOOLS, thoughts=marks)
        parts = [part for piece in pieces_of(text, cuts) for part in parser.push(piece)] + parser.flush()
        return "".join(part.text for part in parts if isinstance(part, Thought)), folded(
            [part for part in parts if not isinstance(part, Thought)]
        )

    assert read(text, cuts, marks) == (thoughts, read(answer, (), None)[1])
