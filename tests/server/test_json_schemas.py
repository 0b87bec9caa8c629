"""What of a schema no grammar enforces is left out, and named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from server.json_schemas import _FORMATS, _UNENFORCED, closed, lenient, without_notes
from specdec.core.types import GrammarKind, GrammarParams
from specdec.errors import InvalidRequestError
from tests.grammar.helpers import start


def compiles(schema: dict[str, Any]) -> bool:
    try:
        start(GrammarParams(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except InvalidRequestError:
        return False
    return True


INSIDE = [
    lambda inner: inner,
    lambda inner: {"type": "object", "properties": {"a": inner}},
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": "array", "prefixItems": [inner]},
    lambda inner: {"anyOf": [{"type": "null"}, inner]},
    lambda inner: {"type": "object", "additionalProperties": inner},
    lambda inner: {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": inner}},
]


@pytest.mark.parametrize("keyword", sorted(_UNENFORCED))
def test_keywords_that_the_library_refuses_are_left_out_and_named(keyword: str) -> None:
    for inside in INSIDE:
        schema = inside({keyword: {}})
        found, warning = lenient(schema)
        assert warning.startswith(f"{keyword}: not enforced")
        assert compiles(found)
        assert not compiles(schema)


def test_formats_that_the_library_does_not_know_are_left_out_and_named() -> None:
    assert not compiles({"type": "string", "format": "path"})
    found, warning = lenient({"type": ["string", "null"], "format": "path", "not": {"const": "a"}})
    assert warning.startswith("format path, not: not enforced")
    assert compiles(found)
    for known in _FORMATS:
        assert compiles({"type": "string", "format": known})


def test_uuids_of_a_version_are_enforced() -> None:
    """pydantic's `UUID4` accepts no other version."""
    for inside in INSIDE:
        found, warning = lenient(inside({"type": "string", "format": "uuid4"}))
        assert warning == ""
        assert compiles(found)
    found, _ = lenient({"type": "string", "format": "uuid7", "title": "T"})
    assert found.keys() == {"type", "title", "pattern"}
    text = "0189f7a2-1b3c-7d4e-8f00-0123456789ab"
    assert re.search(found["pattern"], text)
    assert re.search(found["pattern"], text.upper())
    assert not re.search(found["pattern"], text.replace("-7", "-4"))
    # Values that are listed stay as they are.
    listed, _ = lenient({"enum": ["00000000-0000-0000-0000-000000000000"], "format": "uuid4"})
    assert compiles(listed)


def test_what_is_enforced_stays_as_it_is() -> None:
    for schema in (
        {"type": "integer", "format": "int32"},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"const": {"not": 1}}}},
        {"type": "string", "format": "date"},
        {"enum": [{"not": 1}]},
    ):
        assert lenient(schema) == (schema, "")
        assert compiles(schema)


def test_alternatives_that_one_value_may_match_are_as_any_of() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    found, warning = lenient(schema)
    assert (compiles(schema), compiles(found), warning) == (False, True, "")


@pytest.mark.parametrize("inside", INSIDE)
def test_patterns_that_no_grammar_expresses_are_left_out_and_named(inside: Any) -> None:
    for pattern in ("^(?!a).*$", "(?=a)b", "(?<=a)b", "(?<!a)b", r"\\(?=a)", r"\bword\b", r"(a)\1"):
        schema = inside({"type": "string", "maxLength": 9, "pattern": pattern})
        found, warning = lenient(schema)
        assert warning == "pattern: not enforced, because no grammar expresses it"
        assert found.pop("x-guidance") == {"lenient": True}
        assert found == inside({"type": "string", "maxLength": 9})
        assert not compiles(schema)
    for pattern in (r"a\(?=b", r"\\b", "(?<name>a)", "(?:a|b)", 5):
        schema = inside({"type": "string", "pattern": pattern})
        assert lenient(schema) == (schema, "")


@pytest.mark.parametrize("inside", INSIDE)
def test_counts_of_properties_that_no_grammar_limits_are_left_out_and_named(inside: Any) -> None:
    listed = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    for counts in ({"minProperties": 1}, {"minProperties": 2, "additionalProperties": False}, {"maxProperties": 1}):
        found, warning = lenient(inside({**listed, **counts}))
        assert warning == f"{next(iter(counts))}: not enforced, because no grammar expresses it"
        assert found.pop("x-guidance") == {"lenient": True}
        kept = {key: value for key, value in counts.items() if key == "additionalProperties"}
        assert found == inside({**listed, **kept})


def test_counts_of_properties_that_a_grammar_limits_stay() -> None:
    two = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    for counts in (
        {"minProperties": 1, "additionalProperties": False},
        {"maxProperties": 1, "additionalProperties": False},
        {"minProperties": 1, "required": ["a"]},
        {"maxProperties": 3, "required": ["a", "b"]},
        {"minProperties": "1"},
    ):
        assert lenient({**two, **counts}) == ({**two, **counts}, "")
        assert compiles({**two, **counts}) is (counts != {"minProperties": "1"})


@pytest.mark.parametrize("inside", INSIDE)
def test_bug_bounds_of_whole_types_were_refused(inside: Any) -> None:
    """Programs write those of a 64-bit integer or a 32-bit float, which the library cannot read."""
    whole = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    single = {"type": ["number", "null"], "exclusiveMinimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}
    beyond = {"type": "integer", "minimum": 1 << 63}
    for schema, left_out in ((whole, "minimum"), (single, "exclusiveMinimum, maximum"), (beyond, "minimum")):
        found, warning = lenient(inside(schema))
        assert warning == f"{left_out}: not enforced, because no grammar expresses it"
        assert compiles(found)
        kept = {key: value for key, value in schema.items() if key not in left_out}
        assert found == {**inside(kept), "x-guidance": {"lenient": True}}


def test_bounds_that_a_grammar_expresses_stay() -> None:
    for schema in (
        {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1},
        {"type": ["integer", "null"], "minimum": 1 - (1 << 53), "maximum": (1 << 64) - 1},
        {"type": "number", "minimum": -1e18, "exclusiveMaximum": 1e18},
        {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    ):
        assert lenient(schema) == (schema, "")
        assert compiles(schema)


NO_MORE = {"additionalProperties": False}


@pytest.mark.parametrize("inside", INSIDE)
def test_objects_are_closed_wherever_they_are(inside: Any) -> None:
    one = {"properties": {"b": {"type": "integer"}}}
    found = closed(inside(one))
    if "properties" in inside({}):
        found.pop("additionalProperties")
    assert found == inside({**one, **NO_MORE})


def test_objects_that_mention_further_properties_stay_as_they_are() -> None:
    for further in (
        {"additionalProperties": True},
        {"patternProperties": {"^a": {}}},
        {"unevaluatedProperties": False},
    ):
        schema = {"properties": {"a": {}}, **further}
        assert closed(schema) == schema
    assert closed({"type": "object"}) == {"type": "object"}


def test_objects_that_need_a_property_which_they_do_not_list_stay_open() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
    assert closed(schema) == schema
    assert compiles(closed(schema))
    for required in (["a"], [["b"]], "b", None):  # what is wrong is the library's to refuse
        assert closed({**schema, "required": required}) == {**schema, "required": required, **NO_MORE}


PART: dict[str, Any] = {"properties": {"a": {"properties": {}}}}


@pytest.mark.parametrize(
    "joined",
    [
        {"allOf": [PART, {"properties": {"a": {"properties": {"b": {}}}}}]},
        {**PART, "anyOf": [PART]},
        {**PART, "$ref": "#/$defs/a~1b"},
        {"required": ["b"], "anyOf": [PART]},
        {"patternProperties": {"^b": {}}, "anyOf": [PART]},
    ],
)
def test_schemas_that_are_joined_stay_open_and_those_around_are_closed(joined: dict[str, Any]) -> None:
    assert closed(joined) == joined
    schema = {"properties": {"b": joined, "c": {"items": PART}}, "$defs": {"a/b": PART, "c": PART}}
    apart = json.loads(json.dumps(schema))  # no two of its schemas are one object
    assert closed(apart) == {
        "properties": {"b": joined, "c": {"items": closed(PART)}},
        "$defs": {"a/b": PART if "$ref" in joined else closed(PART), "c": closed(PART)},
        **NO_MORE,
    }


@pytest.mark.parametrize(
    "reference", ["#/a/b", "#/allOf/9", "#/allOf/" + "9" * 5000, "#/allOf/x", "http://a.b", "#x", "#", 5]
)
def test_references_may_lead_anywhere(reference: Any) -> None:
    schema = {"allOf": [{"$ref": reference}, PART]}
    assert closed(schema) == schema  # what applies to it is open


def test_a_long_chain_of_references_is_followed() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    schema = {"allOf": [{"$ref": "#/$defs/d0"}, PART], "$defs": {**chain, "d3000": {"properties": {}}}}
    assert closed(schema) == schema


@pytest.mark.parametrize("inside", INSIDE)
def test_notes_are_left_out_wherever_they_are_and_fields_of_their_names_stay(inside: Any) -> None:
    notes = {"title": "T", "description": "D", "default": {"title": 1}, "examples": [1]}
    named = {"properties": {"title": {"const": {"title": 1}}, "default": {}}, "required": ["title"]}
    assert without_notes(inside({**named, **notes})) == inside(named)
    assert without_notes({**inside(named), **notes}) == inside(named)
