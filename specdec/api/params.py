"""A request's options as gRPC messages and back, by the paths of the parameters in `specdec.core.types`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from specdec.api.v1 import options_pb2 as options
from specdec.core.fields import Param, params_of
from specdec.core.types import GrammarKind, GrammarParams
from specdec.errors import ViolationCollector

Record = TypeVar("Record")
AnyMessage = TypeVar("AnyMessage", bound=Message)
Values = dict[str, Any]


def read_values(record: Any, message: Message, violations: ViolationCollector, prefix: str = "") -> Values:
    """Return the parameters of ``record`` that ``message`` sets, by name.

    Adds unknown values of enums to ``violations``, with ``prefix`` before the field's name.
    """
    found: Values = {}
    readers = _readers(record, message.DESCRIPTOR)
    for field, value in message.ListFields():
        read = readers.get(field.name)
        if read is not None:
            try:
                found |= read(value)
            except _UnknownValueError as error:
                violations.check(False, prefix + field.name, str(error))
    return found


def read_params(record: type[Record], message: Message, violations: ViolationCollector, prefix: str = "") -> Record:
    """Return ``message`` as a ``record``, with its defaults. Problems: as in `read_values`."""
    return record(**read_values(record, message, violations, prefix))


def fill_params(message: AnyMessage, record: Any) -> AnyMessage:
    """Set in ``message`` every parameter of ``record`` that it has a field for and that is not None."""
    kind: Any = type(record)
    names = _writers(kind, message.DESCRIPTOR)
    return fill_values(message, kind, {name: getattr(record, name) for name in names})


def fill_values(message: AnyMessage, record: Any, values: Mapping[str, Any]) -> AnyMessage:
    """As `fill_params`, from ``values`` by parameter name."""
    for name, write in _writers(record, message.DESCRIPTOR).items():
        if values.get(name) is not None:
            write(message, values[name])
    return message


class _UnknownValueError(ValueError):
    """An unknown value of an enum."""


@cache
def _writers(record: Any, descriptor: Descriptor) -> dict[str, Callable[[Any, Any], None]]:
    """Return the setters of a message's fields, by parameter name."""
    return {
        each.name: _writer(each, descriptor)
        for each in params_of(record)
        if each.path.partition(".")[0] in descriptor.fields_by_name
    }


def _writer(each: Param, descriptor: Descriptor) -> Callable[[Any, Any], None]:
    head, _, rest = each.path.partition(".")
    field, scale = descriptor.fields_by_name[head], each.scale
    if rest:
        assert field.message_type is not None
        write = _writer(replace(each, path=rest), field.message_type)
        return lambda message, value: _write_inner(getattr(message, head), write, value, each.default)
    if field.message_type is not None:  # a map
        return lambda message, value: getattr(message, head).update(dict(value))
    if field.is_repeated:
        return lambda message, value: getattr(message, head).extend(value)
    if field.enum_type is not None:
        numbers = {v.name.removeprefix(_enum_prefix(field)).lower(): v.number for v in field.enum_type.values}
        return lambda message, value: setattr(message, head, numbers[value])
    if scale != 1:
        return lambda message, value: setattr(message, head, value * scale)
    return lambda message, value: setattr(message, head, value)


def _write_inner(message: Any, write: Callable[[Any, Any], None], value: Any, default: Any) -> None:
    """Set a field of an inner message. A default is not set, since the message's presence may have a meaning."""
    if value != default:
        message.SetInParent()
        write(message, value)


@cache
def _readers(record: Any, descriptor: Descriptor) -> dict[str, Callable[[Any], Values]]:
    """Return the readers of a message's fields, by field name."""
    found: dict[str, Callable[[Any], Values]] = {}
    inner: dict[str, list[Param]] = {}
    for each in params_of(record):
        head, _, rest = each.path.partition(".")
        field = descriptor.fields_by_name.get(head)
        if field is not None and rest:
            inner.setdefault(head, []).append(each)
        elif field is not None:
            found[head] = _reader(each, field)
    return found | {
        head: _inner_reader(params, descriptor.fields_by_name[head].message_type) for head, params in inner.items()
    }


def _reader(each: Param, field: FieldDescriptor) -> Callable[[Any], Values]:
    name, scale = each.name, each.scale
    if field.message_type is not None:  # a map
        return lambda value: {name: tuple(sorted(value.items()))}
    if field.is_repeated:
        return lambda value: {name: tuple(value)}
    if field.enum_type is not None:
        return lambda value: _enum_value(each, field, value)
    if scale != 1:
        return lambda value: {name: value / scale}
    return lambda value: {name: value}


def _inner_reader(params: list[Param], descriptor: Descriptor | None) -> Callable[[Any], Values]:
    """Return a reader of an inner message. Its fields without presence count as set."""
    assert descriptor is not None
    paths = [(each.name, each.path.partition(".")[2]) for each in params]
    leaves = [(name, leaf, descriptor.fields_by_name[leaf].has_presence) for name, leaf in paths]

    def read(message: Any) -> Values:
        return {name: getattr(message, leaf) for name, leaf, asks in leaves if not asks or message.HasField(leaf)}

    return read


def _enum_prefix(field: FieldDescriptor) -> str:
    return f"{field.name.upper()}_"


def _enum_value(each: Param, field: FieldDescriptor, number: int) -> Values:
    assert field.enum_type is not None
    known = field.enum_type.values_by_number.get(number)
    if known is None:
        names = ", ".join(value.name for value in field.enum_type.values)
        raise _UnknownValueError(f"unknown value {number}; one of {names}")
    return {each.name: type(each.default)(known.name.removeprefix(_enum_prefix(field)).lower())}


def grammar_message(grammar: GrammarParams) -> options.GrammarOptions:
    if grammar.kind == GrammarKind.JSON_OBJECT:
        return options.GrammarOptions(json_object=True)
    if grammar.kind == GrammarKind.CHOICE:
        return options.GrammarOptions(choice=options.Choices(values=json.loads(grammar.text)))
    message = options.GrammarOptions()
    setattr(message, grammar.kind.value, grammar.text)
    return message


def read_grammar(message: options.GrammarOptions, violations: ViolationCollector) -> GrammarParams | None:
    """Return the grammar. If it is invalid, adds to ``violations`` and returns None."""
    which = message.WhichOneof("kind")
    if which is None:
        violations.check(False, "grammar", f"one of {', '.join(kind.value for kind in GrammarKind)} is needed")
        return None
    kind = GrammarKind(which)
    if kind == GrammarKind.JSON_OBJECT:
        violations.check(message.json_object, "grammar.json_object", "must be true; leave grammar unset for any text")
        return GrammarParams(kind)
    if kind == GrammarKind.CHOICE:
        return GrammarParams(kind, json.dumps(list(message.choice.values), ensure_ascii=False))
    return GrammarParams(kind, getattr(message, which))
