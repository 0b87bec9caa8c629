"""Writes docs/api.md's tables from the .proto files and the OpenAPI document: `python -m tools.api_reference`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from server.http.app import ENDPOINTS, openapi_document
from server.http.fields import COMMON, SAMPLING, STOPPING
from server.request_fields import GRAMMAR, PREDICTION, schemas
from specdec.api.generate import PROTOS, run_protoc
from tools.markdown import REPOSITORY, header, row, with_parts

_PACKAGE = ".specdec.api.v1."
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # field numbers of FileDescriptorProto, in the paths of comments
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4  # of DescriptorProto's
_METHODS, _VALUES = 2, 2  # of ServiceDescriptorProto's and EnumDescriptorProto's
_Place = tuple[int, ...]


def grpc_reference() -> str:
    """Services first, then every message and enum, in the order of the files' names."""
    files = [_File(file) for file in _descriptors().file]
    services = [line for file in files for line in file.services()]
    return "\n".join([*services, *(line for file in files for line in file.types())])


def _descriptors() -> FileDescriptorSet:
    """Descriptors of all our .proto files, with comments; raises as `run_protoc`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        run_protoc(PROTOS, "--include_source_info", f"--descriptor_set_out={out}")
        return FileDescriptorSet.FromString(out.read_bytes())


class _File:
    """One .proto file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments: dict[_Place, str] = {}
        for place in file.source_code_info.location:
            texts = (*place.leading_detached_comments, place.leading_comments, place.trailing_comments)
            self._comments[tuple(place.path)] = " ".join(texts)

    def services(self) -> list[str]:
        """Every service with its calls."""
        lines = []
        for i, service in enumerate(self._file.service):
            lines += [f"### {service.name}", "", *self._about((_SERVICES, i)), *header("call", "request", "answer", "")]
            for j, call in enumerate(service.method):
                asked = "stream of " * call.client_streaming + _link(call.input_type)
                answered = "stream of " * call.server_streaming + _link(call.output_type)
                lines.append(row(f"`{call.name}`", asked, answered, self._comment((_SERVICES, i, _METHODS, j))))
            lines.append("")
        return lines

    def types(self) -> list[str]:
        """Every message and enum."""
        lines = []
        for i, message in enumerate(self._file.message_type):
            lines += self._message(message, (_MESSAGES, i), "")
        for i, enum in enumerate(self._file.enum_type):
            lines += self._enum(enum, (_ENUMS, i), "")
        return lines

    def _message(self, message: DescriptorProto, place: _Place, outer: str) -> list[str]:
        if message.options.map_entry:
            return []  # shown with the field that uses it
        name = outer + message.name
        maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        lines = [f"#### {name}", "", *self._about(place)]
        if message.field:
            lines += header("field", "type", "")
        for i, field in enumerate(message.field):
            text = self._comment((*place, _FIELDS, i))
            if field.HasField("oneof_index") and not field.proto3_optional:
                text = f"One of `{message.oneof_decl[field.oneof_index].name}`. {text}"
            lines.append(row(f"`{field.name}` = {field.number}", _proto_type(field, maps), text))
        lines += [] if message.field else ["No fields."]
        lines.append("")
        for i, nested in enumerate(message.nested_type):
            lines += self._message(nested, (*place, _NESTED, i), f"{name}.")
        for i, enum in enumerate(message.enum_type):
            lines += self._enum(enum, (*place, _NESTED_ENUMS, i), f"{name}.")
        return lines

    def _enum(self, enum: EnumDescriptorProto, place: _Place, outer: str) -> list[str]:
        lines = [f"#### {outer}{enum.name}", "", *self._about(place), *header("value", "")]
        for i, value in enumerate(enum.value):
            lines.append(row(f"`{value.name}` = {value.number}", self._comment((*place, _VALUES, i))))
        return [*lines, ""]

    def _about(self, place: _Place) -> list[str]:
        text = self._comment(place)
        return [text.replace("<", "\\<"), ""] if text else []

    def _comment(self, place: _Place) -> str:
        return " ".join(self._comments.get(place, "").split())


def _proto_type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    short = field.type_name.rpartition(".")[2]
    if short in maps:
        key, value = maps[short].field
        return f"map of {_proto_type(key, {})} to {_proto_type(value, {})}"
    if field.type_name:
        name = _link(field.type_name)
    else:
        name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"{name}, optional" if field.proto3_optional else name


def _link(type_name: str) -> str:
    """A link to the heading of one of our types."""
    name = type_name.removeprefix(_PACKAGE)
    return f"[{name}](#{name.lower().replace('.', '')})"


# Fields that many bodies share are listed once.
_SHARED: dict[str, Mapping[str, Any]] = {
    "Common fields": schemas(COMMON), "Sampling fields": schemas(SAMPLING), "Stopping fields": schemas(STOPPING),
    "Grammar fields": schemas(GRAMMAR), "Prediction fields": schemas([PREDICTION]),
}  # fmt: skip
_WORDS = {
    "minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}",
    "minItems": "at least {}", "maxItems": "at most {}", "minLength": "at least {} characters",
}  # fmt: skip


def http_reference() -> str:
    """Shared fields first, then every path in the order of the server's routes."""
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
        lines += [f"`{parameter['name']}` in the {parameter['in']}: {_schema_type(parameter['schema'])}.", ""]
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
        lines.append(row(f"`{outer}{name}`", _schema_type(schema), default, text))
        inner = schema if "properties" in schema else schema.get("items", {})
        mark = "." if "properties" in schema else "[]."
        if "properties" in inner:
            lines += _table(inner["properties"], tuple(inner.get("required", ())), f"{outer}{name}{mark}")
    return lines


def _schema_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_schema_type(part) for part in schema[key]))
    kind = schema.get("type", "any")
    name = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if name == "array" and "items" in schema:
        name = f"list of {_schema_type(schema['items'])}"
    bounds = [_WORDS[word].format(schema[word]) for word in _WORDS if word in schema]
    return ", ".join([name, " ".join(bounds)] if bounds else [name])


DOCUMENT = REPOSITORY / "docs" / "api.md"


def updated(document: str) -> str:
    """``document`` with current tables."""
    return with_parts(document, {"grpc": grpc_reference(), "http": http_reference()})


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
