"""Tool calls come out of a text however it is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.tool_calls import ToolCall, ToolCallParser

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é</tool"}}\n</tool_call>'
PIECES = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<tool_", "call>", '{"name":"f"}', "{", "a", " ", "\n", CALL, "<"])
).map("".join)


def parse(text: str, cuts: list[int]) -> list[str | tuple[str, str]]:
    """Everything that comes out, texts joined."""
    parser, found = ToolCallParser(), []
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(marks):
        found += parser.push(text[start:end])
    found += parser.flush()
    out: list[str | tuple[str, str]] = []
    for part in found:
        if isinstance(part, ToolCall):
            out.append((part.name, part.arguments))
        elif out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    assert parser.calls == sum(isinstance(part, tuple) for part in out)
    return out


@given(text=PIECES, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_how_a_text_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    assert parse(text, cuts) == parse(text, [])
    assert parse(text, list(range(len(text)))) == parse(text, [])


@given(text=PIECES, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_text_without_calls_comes_out_as_it_went_in(text: str, cuts: list[int]) -> None:
    found = parse(text, cuts)
    if not any(isinstance(part, tuple) for part in found):
        assert "".join(part for part in found if isinstance(part, str)) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (CALL, [("look", {"at": "é</tool"})]),
        (f"Well.\n\n{CALL}\n{CALL}\n", ["Well.", ("look", {"at": "é</tool"}), ("look", {"at": "é</tool"})]),
        ('<tool_call>{"name": "f"}', [("f", {})]),  # the model ended its answer instead of closing the tag
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("f", {})]),
        ('a <tool_call>{"name": 5}</tool_call> b', ['a <tool_call>{"name": 5}</tool_call> b']),
        ("Write <tool_call> first", ["Write <tool_call> first"]),
        ('<tool_call>{"name": "f", ', ['<tool_call>{"name": "f", ']),
        ("", []),
    ],
)
def test_calls(text: str, wanted: list[object]) -> None:
    found = [part if isinstance(part, str) else (part[0], json.loads(part[1])) for part in parse(text, [])]
    assert found == wanted


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = ToolCallParser()
    assert parser.push("Hello ") == ["Hello"]
    assert parser.push("there<tool") == [" there"]
    assert parser.push("box>") == ["<toolbox>"]
    assert parser.push(" <tool_call>x") == [" <tool_call>", "x"]


def test_deep_arguments_are_text() -> None:
    deep = '<tool_call>{"name":"f","arguments":' + '{"a":' * 500 + "1" + "}" * 501 + "</tool_call>"
    assert parse(deep, []) == [deep]


def test_every_call_has_an_id_of_its_own() -> None:
    ids = {ToolCall("f", "{}").call_id for _ in range(5)}
    assert len(ids) == 5
