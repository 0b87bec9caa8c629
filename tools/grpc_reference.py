"""The gRPC services and messages as Markdown, with the comments of their .proto files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from specdec.api.generate import PROTOS, ROOT
from tools.marked_part import header, row

_PACKAGE = ".specdec.api.v1."
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # numbers of FileDescriptorProto's fields, of which a comment's path is made
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4  # of DescriptorProto's
_METHODS, _VALUES = 2, 2  # of ServiceDescriptorProto's and EnumDescriptorProto's
_Place = tuple[int, ...]


def grpc_reference() -> str:
    """Services first, then every message and enum, in the order of the files' names."""
    files = [_File(file) for file in _descriptors().file]
    services = [line for file in files for line in file.services()]
    return "\n".join([*services, *(line for file in files for line in file.types())])


def _descriptors() -> FileDescriptorSet:
    """Of all our .proto files, with comments.

    Raises:
        RuntimeError: protoc refused them; it has said why on standard error.
    """
    from grpc_tools import protoc  # comes with the `dev` extra

    found = FileDescriptorSet()
    protos = sorted((ROOT / PROTOS).glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        options = [f"-I{ROOT}", "--include_source_info", f"--descriptor_set_out={out}"]
        code = protoc.main(["protoc", *options, *map(str, protos)])
        if code != 0:
            raise RuntimeError(f"protoc ended with code {code}")
        found.ParseFromString(out.read_bytes())
    return found


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
            return []  # shown where it is used
        name = outer + message.name
        maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        lines = [f"#### {name}", "", *self._about(place)]
        if message.field:
            lines += header("field", "type", "")
        for i, field in enumerate(message.field):
            text = self._comment((*place, _FIELDS, i))
            if field.HasField("oneof_index") and not field.proto3_optional:
                text = f"One of `{message.oneof_decl[field.oneof_index].name}`. {text}"
            lines.append(row(f"`{field.name}` = {field.number}", _type(field, maps), text))
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


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    short = field.type_name.rpartition(".")[2]
    if short in maps:
        key, value = maps[short].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    if field.type_name:
        name = _link(field.type_name)
    else:
        name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"{name}, optional" if field.proto3_optional else name


def _link(type_name: str) -> str:
    """To the heading of a type of ours."""
    name = type_name.removeprefix(_PACKAGE)
    return f"[{name}](#{name.lower().replace('.', '')})"
