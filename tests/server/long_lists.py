"""Messages with long lists, for every repeated field that a client may send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from server.grpc.wire_limits import WIRE_LIMITS


def repeated_fields(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of a message's repeated fields."""
    for each in descriptor.fields:
        here = (*path, each.name)
        if each.is_repeated:
            yield here
        elif each.message_type is not None:
            yield from repeated_fields(each.message_type, here)


def limit_of(path: tuple[str, ...]) -> int:
    """The maximum of the field at ``path``."""
    return next(WIRE_LIMITS[end] for i in range(len(path)) if (end := ".".join(path[i:])) in WIRE_LIMITS)


def with_items(
    descriptor: Descriptor, path: tuple[str, ...], count: int, number: int = 70_000, message: Message | None = None
) -> Message:
    """``message``, or an empty one, with ``count`` items at ``path``; numbers are all ``number``."""
    message = GetMessageClass(descriptor)() if message is None else message
    holder: Any = message
    for name in path[:-1]:
        holder = getattr(holder, name)
    field = holder.DESCRIPTOR.fields_by_name[path[-1]]
    items = getattr(holder, path[-1])
    if field.message_type is None:
        items.extend(["x" if field.cpp_type == field.CPPTYPE_STRING else number] * count)
    elif field.message_type.GetOptions().map_entry:
        items.update(dict.fromkeys(range(count), 1.0))
    else:
        items.extend([GetMessageClass(field.message_type)()] * count)
    return message
