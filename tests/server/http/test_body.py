"""Bodies: how their fields are read, and that nothing breaks the reader."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.json_body import MAX_DEPTH, Body, read_object, write_json
from specdec.errors import InvalidRequestError, ViolationCollector

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
READERS = [
    lambda b: b.text("x"),
    lambda b: b.flag("x"),
    lambda b: b.number("x"),
    lambda b: b.integer("x", -5, 5),
    lambda b: b.texts("x"),
    lambda b: b.integers("x", -5, 5),
    lambda b: b.object("x"),
    lambda b: b.objects("x"),
    lambda b: b.value("x"),
]


def body(**data: Any) -> Body:
    return Body(data, ViolationCollector())


@given(value=JSON)
def test_any_value_is_either_returned_or_reported_as_an_error(value: Any) -> None:
    for read in READERS:
        one = body(x=value)
        nothing = read(body())
        found = read(one)
        assert len(one.violations.found) <= 1
        if one.violations.found:
            assert one.violations.found[0].field == "x"
            assert found == nothing
        elif value is None:
            assert found == nothing


@given(value=JSON)
def test_each_reader_accepts_exactly_its_type(value: Any) -> None:
    def read(name: str, *args: Any) -> tuple[Any, bool]:
        one = body(x=value)
        return getattr(one, name)("x", *args), bool(one.violations.found)

    none, plain_int = value is None, type(value) is int
    assert read("text")[1] == (not none and not isinstance(value, str))
    assert read("flag")[1] == (not none and not isinstance(value, bool))
    is_number = (plain_int or isinstance(value, float)) and math.isfinite(value)
    number, bad = read("number")
    assert bad == (not none and not is_number)
    assert bad or none or (number == float(value) and type(number) is float)
    whole = is_number and value == int(value) and -5 <= value <= 5
    integer, bad = read("integer", -5, 5)
    assert bad == (not none and not whole)
    assert bad or none or (integer == value and type(integer) is int)
    ids = isinstance(value, list) and all(type(i) is int and -5 <= i <= 5 for i in value)
    assert read("integers", -5, 5)[1] == (not none and not ids)
    texts = isinstance(value, str) or (isinstance(value, list) and all(isinstance(t, str) for t in value))
    assert read("texts")[1] == (not none and not texts)
    assert read("object")[1] == (not none and not isinstance(value, dict))


def test_error_paths_start_at_the_root() -> None:
    one = body(a={"b": [{"c": 1}, {"c": {}}]})
    inner = one.object("a")
    assert inner is not None
    for item in inner.objects("b"):
        item.text("c")
    assert [v.field for v in one.violations.found] == ["a.b[0].c", "a.b[1].c"]


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"k": inner}])
def test_depth_is_limited_exactly(make: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = make(value)
    one = body(x=value, y=make(value))
    assert one.value("x") == value
    assert one.value("y") is None
    assert [v.field for v in one.violations.found] == ["y"]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"1", b"null", b'"x"', b"{}x", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1e999}',
        b'{"a":"\\ud800"}', b'{"a":"\xff"}', b"\xff\xfe{\x00}\x00", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":' + b"1" * 5000 + b"}", b"{'a':1}", b'{"a":01}', b'{"a":1,}',
    ],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_object(data)
    assert [v.field for v in caught.value.violations] == ["body"]


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), st.text(st.characters(codec="utf-8"))))
def test_objects_round_trip(value: dict[str, str]) -> None:
    data = write_json(value)
    assert read_object(data) == json.loads(data) == value
