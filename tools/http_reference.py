"""The HTTP endpoints as Markdown, from the OpenAPI document that the server shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.http.app import ENDPOINTS
from server.http.fields.schema import COMMON, GRAMMAR, PREDICTION, SAMPLING, STOPPING
from server.http.openapi import openapi_document
from tools.marked_part import header, row

# Fields that many bodies share are told once.
_SHARED: dict[str, Mapping[str, Any]] = {
    "Common fields": COMMON, "Sampling fields": SAMPLING, "Stopping fields": STOPPING, "Grammar fields": GRAMMAR,
    "Prediction fields": PREDICTION,
}  # fmt: skip
_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minItems", "maxItems", "minLength")
_WORDS = {
    "minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}",
    "minItems": "at least {}", "maxItems": "at most {}", "minLength": "at least {} characters",
}  # fmt: skip


def http_reference() -> str:
    """Shared fields first, then every path in the order in which the server looks for it."""
    lines = []
    for name, fields in _SHARED.items():
        lines += [f"### {name}", "", *_table(fields, ()), ""]
    for path, methods in openapi_document(ENDPOINTS)["paths"].items():
        for method, operation in methods.items():
            lines += _operation(method.upper(), path, operation)
    return "\n".join(lines)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> list[str]:
    lines = [f"### {method} {path}", "", f"{operation['summary']}.", ""]
    for parameter in operation.get("parameters", ()):
        lines += [f"`{parameter['name']}` in the {parameter['in']}: {_type(parameter['schema'])}.", ""]
    if "requestBody" not in operation:
        return lines
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    bodies = schema.get("anyOf", [schema])
    for i, body in enumerate(bodies, 1):
        lines += [f"Body {i} of {len(bodies)}:", ""] * (len(bodies) > 1)
        lines += _body(body.get("properties", {}), tuple(body.get("required", ())))
    return lines


def _body(fields: Mapping[str, Any], required: tuple[str, ...]) -> list[str]:
    left, shared = dict(fields), []
    for name, group in _SHARED.items():
        if all(left.get(field) == schema for field, schema in group.items()):
            shared.append(f"[{name.lower()}](#{name.lower().replace(' ', '-')})")
            left = {field: schema for field, schema in left.items() if field not in group}
    lines = [*_table(left, required), ""] if left else ["Any object.", ""] if not shared else []
    if shared:
        lines += [f"{'And the' if left else 'The'} {', '.join(shared)}.", ""]
    return lines


def _table(fields: Mapping[str, Any], required: tuple[str, ...], outer: str = "") -> list[str]:
    lines = [] if outer else header("field", "type", "default", "")
    for name, schema in fields.items():
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
        text = "Required. " * (name in required) + schema.get("description", "")
        lines.append(row(f"`{outer}{name}`", _type(schema), default, text))
        inner = schema if "properties" in schema else schema.get("items", {})
        mark = "." if "properties" in schema else "[]."
        if "properties" in inner:
            lines += _table(inner["properties"], tuple(inner.get("required", ())), f"{outer}{name}{mark}")
    return lines


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[key]))
    kind = schema.get("type", "any")
    name = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if name == "array" and "items" in schema:
        name = f"list of {_type(schema['items'])}"
    bounds = [_WORDS[word].format(schema[word]) for word in _KEYWORDS if word in schema]
    return ", ".join([name, " ".join(bounds)] if bounds else [name])
