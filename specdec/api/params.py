"""A request's options as gRPC messages and back, by the paths of the parameters in `specdec.core.types`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Place:
    """The field of a message that has a parameter."""

    param: Param
    field: FieldDescriptor
    name: str  # of the field
    holder: str  # the message's own field in which it lies; empty: it is one
    is_map: bool

    @property
    def prefix(self) -> str:
        """What the names of an enum's values begin with."""
        return f"{self.name.upper()}_"


@cache
def _places(record: Any, descriptor: Descriptor) -> tuple[_Place, ...]:
    """Return the places of those parameters of ``record`` that the message has."""
    found: list[_Place] = []
    for each in params_of(record):
        holder, _, name = each.path.rpartition(".")
        owner: Descriptor | None = descriptor
        if holder:
            outer = descriptor.fields_by_name.get(holder)
            owner = None if outer is None else outer.message_type
        if owner is not None and name in owner.fields_by_name:
            field = owner.fields_by_name[name]
            found.append(_Place(each, field, name, holder, field.message_type is not None))
    return tuple(found)


def read_values(record: Any, message: Message, violations: ViolationCollector, prefix: str = "") -> Values:
    """Return the parameters of ``record`` that ``message`` sets, by name. All fields without presence of an inner
    message that is set count as set.

    Adds unknown values of enums to ``violations``, with ``prefix`` before the field's name.
    """
    found: Values = {}
    given = {field.name: value for field, value in message.ListFields()}
    for place in _places(record, message.DESCRIPTOR):
        value = given.get(place.holder or place.name)
        if value is None:
            continue
        field, each = place.field, place.param
        if place.holder:
            if field.has_presence and not value.HasField(place.name):
                continue
            value = getattr(value, place.name)
        if place.is_map:
            value = tuple(sorted(value.items()))
        elif field.is_repeated:
            value = tuple(value)
        elif field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            if known is None:
                names = ", ".join(one.name for one in field.enum_type.values)
                violations.check(False, prefix + place.name, f"unknown value {value}; one of {names}")
                continue
            value = type(each.default)(known.name.removeprefix(place.prefix).lower())
        elif each.scale != 1:
            value = value / each.scale
        found[each.name] = value
    return found


def read_params(record: type[Record], message: Message, violations: ViolationCollector, prefix: str = "") -> Record:
    """Return ``message`` as a ``record``, with its defaults. Problems: as in `read_values`."""
    return record(**read_values(record, message, violations, prefix))


def fill_params(message: AnyMessage, record: Any) -> AnyMessage:
    """Set in ``message`` every parameter of ``record`` that it has a field for and that is not None."""
    kind: Any = type(record)
    return fill_values(message, kind, {each.name: getattr(record, each.name) for each in params_of(kind)})


def fill_values(message: AnyMessage, record: Any, values: Mapping[str, Any]) -> AnyMessage:
    """As `fill_params`, from ``values`` by parameter name; raises ValueError, which names one that does not fit."""
    for place in _places(record, message.DESCRIPTOR):
        each, name, owner = place.param, place.name, message
        value = values.get(each.name)
        if value is None:
            continue
        if place.holder:
            if value == each.default:
                continue  # the inner message's presence may have a meaning
            owner = getattr(message, place.holder)
            owner.SetInParent()
        try:
            if place.is_map:
                getattr(owner, name).update(dict(value))
            elif place.field.is_repeated:
                getattr(owner, name).extend(value)
            elif (enum := place.field.enum_type) is not None:
                setattr(owner, name, enum.values_by_name[f"{place.prefix}{value.upper()}"].number)
            else:
                setattr(owner, name, value if each.scale == 1 else value * each.scale)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:  # which name no field
            raise ValueError(f"{each.path}: cannot be {value!r:.99} ({error})") from None
    return message


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
