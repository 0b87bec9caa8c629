"""Messages from their descriptors: good ones, ones with odd values, and bytes that are none."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.words import GRAMMARS, INTEGERS, NUMBERS, TEXTS

_DEEPEST = 5
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_NUMBERS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
# Fields that must be consistent for a call to get far, and fields that would make most of them long.
_LIKELY: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, 1, 2, 3, 8), "n": (1, 1, 2, 3), "model": ("", "", "random:tiny"), "salt": ("", "a"),
    "uri": ("a.py", "b.py"), "version": (0, 1, 2, 3), "from_version": (0, 1, 2), "offset": (0, 1, 2, 5),
    "start": (0, 1),
    "end": (1, 2), "request_id": ("", "", "r", "s"), "temperature": (0.0, 0.7, 1.0), "max_prompt_tokens": (64, 100),
    "role": ("user", "system", "assistant"), "text": ("hi", "def f(x):\n", "a b c"), "regex": GRAMMARS,
    "json_schema": GRAMMARS, "ebnf": GRAMMARS, "id": (1, 2, 3),
}  # fmt: skip


class MessageFuzzer:
    """Draws from ``random``, so the same one gives the same messages."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def wire(self, descriptor: Descriptor) -> bytes:
        """The bytes of a message, or of something like one."""
        draw = self._random
        kind = draw.random()
        if kind < 0.05:
            return draw.randbytes(draw.randrange(80))
        data = self.message(descriptor).SerializeToString()
        if kind < 0.1:
            return data[: draw.randrange(len(data) + 1)]
        if kind < 0.17 and data:
            at = draw.randrange(len(data))
            return data[:at] + draw.randbytes(draw.randrange(4)) + data[at + 1 :]
        return data

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """A message that can be read."""
        found: Message = GetMessageClass(descriptor)()
        fields = list(descriptor.fields)
        likely = min(0.7, 4 / max(1, len(fields)))
        for field in fields:
            needed = field.containing_oneof is not None and not field.has_presence
            if self._random.random() < (0.5 if needed else likely):
                self._fill(found, field, depth)
        # A choice without any member is rejected immediately, which is covered often enough.
        for group in descriptor.oneofs:
            if group.fields and found.WhichOneof(group.name) is None and self._random.random() < 0.8:
                self._fill(found, self._random.choice(group.fields), depth)
        return found

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            self._fill_map(message, field, depth)
        elif field.is_repeated:
            many = getattr(message, field.name)
            for _ in range(self._random.choice((0, 1, 1, 2, 3, 70 if self._random.random() < 0.05 else 1))):
                if kind is None:
                    many.append(self._scalar(field))
                elif depth < _DEEPEST:
                    many.add().CopyFrom(self.message(kind, depth + 1))
        elif kind is None:
            setattr(message, field.name, self._scalar(field))
        elif depth < _DEEPEST:
            getattr(message, field.name).CopyFrom(self.message(kind, depth + 1))

    def _fill_map(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        assert field.message_type is not None
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self._random.randrange(3)):
            if value.message_type is None:
                getattr(message, field.name)[self._scalar(key)] = self._scalar(value)
            elif depth < _DEEPEST:
                getattr(message, field.name)[self._scalar(key)].CopyFrom(self.message(value.message_type, depth + 1))

    def _scalar(self, field: FieldDescriptor) -> Any:
        draw = self._random
        kind = field.cpp_type
        if field.name in _LIKELY and draw.random() < 0.85:
            found = draw.choice(_LIKELY[field.name])
            if isinstance(found, str) == (kind == FieldDescriptor.CPPTYPE_STRING):
                return found
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(TEXTS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if kind in _NUMBERS:
            return draw.choice(NUMBERS)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            numbers = [value.number for value in field.enum_type.values]
            return draw.choice((*numbers, *numbers, *numbers, 99, -1))
        least, most = _LIMITS[kind]
        return min(most, max(least, draw.choice(INTEGERS[:12] if draw.random() < 0.7 else INTEGERS)))
