"""JSON schemas that callers send for answers and for arguments of tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_UNENFORCED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
_FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_ONE_OF = "oneOf"  # enforced where no value matches two alternatives, as far as the library can tell
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values are schemas by name
_LISTED = ("prefixItems", "items", "anyOf", "allOf", _ONE_OF)
_SINGLE = ("items", "additionalProperties", "additionalItems")


def lenient(schema: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The schema such that its grammar leaves out what no grammar expresses, and a warning that names that; empty:
    everything is enforced. The schema must not be nested deeper than code may recurse."""
    found = [*dict.fromkeys(_left_out(schema))]
    options = schema.get("x-guidance", {})
    if not found or not isinstance(options, dict):
        return dict(schema), ""
    names = ", ".join(name for name in found if name != _ONE_OF)
    warning = f"{names}: not enforced, because no grammar expresses it" if names else ""
    return {**schema, "x-guidance": {"lenient": True, **options}}, warning


def _left_out(schema: Any) -> Iterator[str]:
    """Keywords that llguidance refuses unless it is lenient."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _UNENFORCED or keyword == _ONE_OF:
            yield keyword
        elif keyword == "format" and value not in _FORMATS and _may_be_text(schema):
            yield f"format {str(value)[:32]}"
    for inner in inner_schemas(schema):
        yield from _left_out(inner)


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of which ``schema`` consists, those of its definitions included."""
    for keyword in _NAMED:
        if isinstance(named := schema.get(keyword), dict):
            yield from named.values()
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            yield from listed
    for keyword in _SINGLE:
        yield schema.get(keyword)
