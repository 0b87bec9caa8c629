"""Limits on repeated fields, counted on a message's bytes before protobuf unpacks them.

Unpacked, a repeated field takes up to 50 times its bytes, and its time with the interpreter held. The counts follow the
wire format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from specdec.core.fields import (
    MAX_OBJECTS,
    MAX_PREDICTION_TOKENS,
    MAX_PROMPT_TOKENS,
    Repeated,
    params_of,
)
from specdec.core.types import ResumeParams, SamplingParams, SpeculationParams, StoppingParams
from specdec.errors import InvalidRequestError

MAX_WIRE_FIELDS = 1 << 15
"""Fields of one message as they are sent. A packed list is one; 8,192 chat messages are as many."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(0x80, 0x100))  # bytes of a varint that are not its last
_MAX_VARINT = 10  # bytes
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def _limits() -> Iterator[tuple[str, int]]:
    groups = {
        "sampling": SamplingParams, "stopping": StoppingParams, "speculation": SpeculationParams, "resume": ResumeParams
    }  # fmt: skip
    for group, record in groups.items():
        for each in params_of(record):
            if isinstance(each.kind, Repeated):
                yield f"{group}.{each.path}", each.kind.limit
    yield "token_ids.ids", MAX_PROMPT_TOKENS
    yield "token_ids", MAX_PROMPT_TOKENS
    yield "prediction.token_ids.ids", MAX_PREDICTION_TOKENS
    for name in ("chat.messages", "extra", "recent", "diagnostics", "edits.edits", "grammar.choice.values"):
        yield name, MAX_OBJECTS


WIRE_LIMITS = dict(_limits())
"""The most items of each repeated field, by the end of its path in a request's message."""


@dataclass(slots=True)
class _Field:
    path: str
    limit: int = 0  # 0: not repeated
    packs_varints: bool = False
    inner: dict[int, _Field] = field(default_factory=dict)
    """By number, the fields of a message that holds repeated fields."""


@cache
def _plan(descriptor: Descriptor, path: str = "") -> dict[int, _Field]:
    found: dict[int, _Field] = {}
    for each in descriptor.fields:
        here = f"{path}.{each.name}" if path else each.name
        planned = _Field(here)
        if each.is_repeated:
            planned.limit = _limit_of(here)
            planned.packs_varints = each.message_type is None and each.type != FieldDescriptor.TYPE_STRING
        if each.message_type is not None:
            planned.inner = _plan(each.message_type, here)
        if planned.limit or planned.inner:
            found[each.number] = planned
    return found


def _limit_of(path: str) -> int:
    parts = path.split(".")
    return next(WIRE_LIMITS[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in WIRE_LIMITS)


def check_wire(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message that is longer than the limits, whether or not the rest of it can be read.

    Raises:
        InvalidRequestError: a repeated field has too many items, or the message too many fields.
    """
    if len(data) > min(WIRE_LIMITS.values()):  # an item takes a byte at least
        _Scan(data).message(0, len(data), _plan(descriptor))


class _Scan:
    """Counts what one message holds. Ends where it is malformed: protobuf refuses it then."""

    def __init__(self, data: bytes) -> None:
        self._data, self._fields, self._items = data, 0, Counter[str]()

    def message(self, at: int, end: int, plan: dict[int, _Field]) -> bool:
        """Count the fields in data[at:end]; returns False if they are malformed."""
        while at < end:
            self._fields += 1
            if self._fields > MAX_WIRE_FIELDS:
                raise InvalidRequestError.of(
                    "message", f"at most {MAX_WIRE_FIELDS} fields; send lists of numbers packed"
                )
            tag, at = self._varint(at)
            wire_type, found = tag & 7, plan.get(tag >> 3)
            if wire_type == _VARINT:
                _, next_at = self._varint(at)
            elif wire_type == _BYTES:
                length, at = self._varint(at)
                next_at = at + length
            elif wire_type in _FIXED_BYTES:
                next_at = at + _FIXED_BYTES[wire_type]
            else:
                raise InvalidRequestError.of("message", "groups are not supported")
            if next_at > end:
                return False
            if found is not None:
                if found.limit:
                    self._count(found, at, next_at, packed=found.packs_varints and wire_type == _BYTES)
                if found.inner and wire_type == _BYTES and not self.message(at, next_at, found.inner):
                    return False
            at = next_at
        return True

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the number at ``at`` and where it ends, beyond the data if it is cut off."""
        value = shift = 0
        for byte in self._data[at : at + _MAX_VARINT]:
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        return 0, len(self._data) + 1

    def _count(self, found: _Field, at: int, end: int, *, packed: bool) -> None:
        self._items[found.path] += len(self._data[at:end].translate(None, _CONTINUED)) if packed else 1
        if self._items[found.path] > found.limit:
            raise InvalidRequestError.of(found.path, f"at most {found.limit} items")
