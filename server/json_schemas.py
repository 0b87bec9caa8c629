"""JSON schemas that callers send for answers and for arguments of tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_UNENFORCED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
_FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_UUID = re.compile("uuid([1-8])")
# Look-around, word boundaries and references to groups, which a pattern of zod or of a tool may have.
_LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9])")
_ONE_OF = "oneOf"  # enforced where no value matches two alternatives, as far as the library can tell
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *_DEFINITIONS)  # keywords whose values are schemas by name
_LISTED = ("prefixItems", "items", "anyOf", "allOf", _ONE_OF)
_SINGLE = ("items", "additionalProperties", "additionalItems")
_NOTES = ("description", "title", "examples", "default")  # which no grammar uses
_FURTHER = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COUNTS = ("minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_WIDEST = (1 << 63) - 1024  # the largest float within the 64 bits by which the library compares
_OWN = frozenset({"type", "enum", "const", "properties"})  # beside which `branches` only narrow a schema


def lenient(schema: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A copy of the schema whose grammar leaves out the keywords that no grammar expresses, and a warning that lists
    them; empty: the grammar enforces all. The schema must not be nested deeper than code may recurse."""
    schema = _changed(schema, _with_uuids)
    found = [*dict.fromkeys(_left_out(schema))]
    options = schema.get("x-guidance", {})
    if not found or not isinstance(options, dict):
        return dict(schema), ""
    names = ", ".join(name for name in found if name != _ONE_OF)
    warning = f"{names}: not enforced, because no grammar expresses it" if names else ""
    kept = _changed(schema, lambda each: {key: value for key, value in each.items() if not _is_refused(key, each)})
    return {**kept, "x-guidance": {"lenient": True, **options}}, warning


def _with_uuids(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a pattern in place of pydantic's ``"format": "uuid4"`` and the like."""
    version = _UUID.fullmatch(str(schema.get("format")))
    if version is None or any(rule in schema for rule in ("pattern", "enum", "const", "maxLength")):
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    digit = "[0-9a-fA-F]"
    parts = f"{digit}{{8}}", f"{digit}{{4}}", f"{version[1]}{digit}{{3}}", f"[89abAB]{digit}{{3}}", f"{digit}{{12}}"
    return rest | {"pattern": f"^{'-'.join(parts)}$"}


def _left_out(schema: Mapping[str, Any]) -> Iterator[str]:
    """Keywords that llguidance refuses unless it is lenient, patterns, `_BOUNDS` and `_COUNTS` also then."""
    for each in _all(schema):
        kinds = each.get("type", "string")
        may_be_text = "string" in (kinds if isinstance(kinds, list) else [kinds])
        for keyword, value in each.items():
            if keyword in _UNENFORCED or keyword == _ONE_OF or _is_refused(keyword, each):
                yield keyword
            elif keyword == "format" and isinstance(value, str) and value not in _FORMATS and may_be_text:
                yield f"format {value[:32]}"


def _is_counted(schema: Mapping[str, Any]) -> bool:
    """Whether a grammar can limit the number of properties. Where some are optional, it can require one more than the
    required ones at most, and allow one more at least if no unlisted property is allowed. The library refuses what is
    wrong."""
    listed, required = schema.get("properties"), schema.get("required", [])
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    is_valid = isinstance(required, list) and type(least) is int and (most is None or type(most) is int)
    if not is_valid or not isinstance(listed, dict):
        return True
    one_more = len(required) + 1
    if all(name in required for name in listed) or (most is None and least < one_more):
        return True
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return is_closed and least <= one_more and most in (None, one_more)


def _is_refused(keyword: str, schema: Mapping[str, Any]) -> bool:
    value = schema[keyword]
    if keyword == "pattern":
        return isinstance(value, str) and _LOOKS.search(value) is not None
    if keyword in _BOUNDS and isinstance(value, int | float) and abs(value) > _WIDEST:
        is_upper = keyword in ("maximum", "exclusiveMaximum")
        return value < 0 or not is_upper or "number" in json_types(schema)  # a large upper one of integers is enforced
    return keyword in _COUNTS and not _is_counted(schema)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of which ``schema`` consists, those of its definitions included."""
    for keyword in _NAMED:
        if isinstance(named := schema.get(keyword), dict):
            yield from named.values()
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            yield from listed
    for keyword in _SINGLE:
        yield schema.get(keyword)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema in which objects have only the properties that they list, unless it mentions further ones.

    Where several schemas apply to one value, each would refuse the properties of the others. So these stay open, and
    what is inside of them, to which several may apply too.
    """
    waiting: list[Any] = [each for each in _all(schema) if _is_joint(each)]
    joint: set[int] = set()  # the schemas that stay open, by their identity
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and id(each) not in joint:
            joint.add(id(each))
            waiting += _inner({key: value for key, value in each.items() if key not in _DEFINITIONS})
            waiting.append(target(each.get("$ref"), schema))
    return _changed(schema, lambda each: each if id(each) in joint else _closed_itself(each))


def target(reference: Any, root: Any) -> Any:
    """The schema to which ``reference`` points; None: there is none in ``root``."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


JSON_TYPES: Mapping[type, str] = {  # names that schemas have for the types of values
    bool: "boolean", dict: "object", float: "number", int: "integer", list: "array", str: "string", type(None): "null",
}  # fmt: skip


def branches(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of which a value of ``schema`` matches one, if ``schema`` is nothing but a reference in ``root`` or a
    list of them, else ``schema``."""
    return [each for each, is_branch in looked_at(schema, root) if is_branch] or [{}]


def looked_at(schema: Any, root: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every schema at which `branches` looks, however often it does, and whether it is one of them."""
    waiting, seen = [schema], dict[int, dict[str, Any]]()  # by their identity
    while waiting:
        each = waiting.pop()
        each = each if isinstance(each, dict) else {}
        if id(each) in seen:
            yield each, False
            continue
        seen[id(each)] = each
        parts = [each[keyword] for keyword in ("anyOf", _ONE_OF, "allOf") if keyword in each]
        if isinstance(referred := target(each.get("$ref"), root), dict):
            parts.append([referred])
        is_list = len(parts) == 1 and isinstance(parts[0], list) and not _OWN.intersection(each)
        is_list = is_list and ("allOf" not in each or len(parts[0]) == 1)
        if is_list:
            waiting += reversed(parts[0])
        yield each, not is_list


def choices(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows; None: it does not list them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def json_types(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema's values, apart from its `branches`; all if it names none. Integers are numbers too."""
    if (values := choices(schema)) is not None:
        found = {JSON_TYPES[type(each)] for each in values}
    else:
        given = schema.get("type")
        found = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    found = found or {*JSON_TYPES.values()}
    if schema.get("nullable") is True:  # OpenAPI's
        found.add("null")
    return found | {"integer"} if "number" in found else found


def without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema without the keywords in `_NOTES`. Fields that have the name of such a keyword stay."""
    return _changed(schema, lambda each: {key: value for key, value in each.items() if key not in _NOTES})


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy to which ``change`` is applied, as it is to all schemas inside."""
    if not isinstance(schema, dict):
        return schema
    found = {**change(schema)}
    for keyword in _NAMED:
        if isinstance(named := schema.get(keyword), dict):
            found[keyword] = {name: _changed(inner, change) for name, inner in named.items()}
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            found[keyword] = [_changed(inner, change) for inner in listed]
    for keyword in _SINGLE:
        if isinstance(inner := schema.get(keyword), dict):
            found[keyword] = _changed(inner, change)
    return found


def _closed_itself(schema: Mapping[str, Any]) -> dict[str, Any]:
    listed, required = schema.get("properties"), schema.get("required")
    needs_more = (
        isinstance(listed, dict)
        and isinstance(required, list)
        and any(isinstance(name, str) and name not in listed for name in required)
    )  # nothing matches it if closed
    is_open = "properties" not in schema or needs_more or any(keyword in schema for keyword in _FURTHER)
    return dict(schema) if is_open else {"additionalProperties": False, **schema}


def _is_joint(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas apply to the value."""
    all_of = schema.get("allOf")
    parts = len(all_of) if isinstance(all_of, list) else 0
    own = any(keyword in schema for keyword in ("properties", "required", *_FURTHER))
    return parts + own + sum(keyword in schema for keyword in ("anyOf", _ONE_OF, "$ref")) > 1


def _all(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema, and all inside of it."""
    if isinstance(schema, dict):
        yield schema
        for inner in _inner(schema):
            yield from _all(inner)
