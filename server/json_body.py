"""JSON objects that callers send: read strictly, field by field, noting every field that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from specdec.core.fields import MAX_OBJECTS
from specdec.errors import FieldViolation, InvalidRequestError, ViolationCollector

MAX_VALUES = 1 << 18  # some 30 ms
LARGE_BYTES = 1 << 19
_SEPARATORS = (b",", b"[", b"{")


def count_values(piece: bytes) -> int:
    """At least as many values as a piece of JSON adds; those that its strings look as if they held among them."""
    return sum(map(piece.count, _SEPARATORS))


def check_values(size: int, values: int) -> None:
    """Refuse a body of ``size`` bytes that takes long to take apart, which would hold up everybody.

    Raises:
        InvalidRequestError: it has too many ``values``, by `count_values`.
    """
    if size > LARGE_BYTES and values > MAX_VALUES:
        raise InvalidRequestError(
            [FieldViolation("body", f"has more than {MAX_VALUES} commas and brackets; send less")]
        )


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``, UTF-8.

    Raises:
        InvalidRequestError: it is not JSON (NaN, infinities and halves of surrogate pairs are not), or not an object.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError([FieldViolation("body", f"is not JSON ({error}); send a JSON object")]) from None
    if not isinstance(value, dict):
        raise InvalidRequestError([FieldViolation("body", "must be a JSON object")])
    return value


def write_json(value: Any) -> bytes:
    """``value`` as compact JSON."""
    return orjson.dumps(value)


MAX_DEPTH = 64
_EXACT = 1 << 53  # whole numbers up to here are exact as floats


class Body:
    """A JSON object whose fields are read one by one; a null field reads as an absent one, unknown fields as nothing.

    A field of a wrong type reads as absent, and ``violations`` is told. ``names`` gives the engine's names of fields
    that are called otherwise here; it fills as fields are read, so that a later refusal can name them.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        violations: ViolationCollector,
        names: dict[str, str] | None = None,
        path: str = "",
    ) -> None:
        self._data, self._path = data, path
        self.violations = violations
        self.names = {} if names is None else names

    @property
    def field_names(self) -> tuple[str, ...]:
        """Every field there is, null ones too."""
        return tuple(self._data)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._data.get(name) is not None

    def path(self, name: str) -> str:
        """The field's name from the top of the body on."""
        return f"{self._path}{name}"

    def refuse(self, name: str, problem: str) -> None:
        """Note that the field is wrong."""
        self.violations.check(False, self.path(name), problem)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._data.get(name)
        if value is None or isinstance(value, str):
            return value
        self.refuse(name, "must be a string")
        return None

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._data.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(name, "must be true or false")
        return default

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(name, "must be a number")
            return None
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``; 3.0 is one too."""
        value = self.whole(name, low, high)
        if value is not None and not low <= value <= high:
            self.refuse(name, f"must be a whole number from {low} to {high}")
            return None
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Any whole number; ``low`` and ``high`` are only told to who sends something else."""
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"must be a whole number from {low} to {high}")
            return None
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings."""
        value = self._data.get(name)
        if value is None:
            return ()
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
            self.refuse(name, "must be a string or a list of strings")
            return ()
        return tuple(given)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers from ``low`` to ``high``."""
        value = self._data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(i) is int and low <= i <= high for i in value):
            self.refuse(name, f"must be a list of whole numbers from {low} to {high}")
            return ()
        return tuple(value)

    def object(self, name: str) -> Body | None:
        """An object, to be read in turn."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
            return None
        return Body(value, self.violations, self.names, f"{self.path(name)}.")

    def objects(self, name: str) -> list[Body]:
        """A list of objects, `MAX_OBJECTS` at most, to be read in turn."""
        value = self._data.get(name)
        if value is None:
            return []
        if isinstance(value, list) and len(value) > MAX_OBJECTS:
            self.refuse(name, f"holds {len(value)} values, at most {MAX_OBJECTS} may be; send fewer")
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.refuse(name, "must be a list of objects")
            return []
        return [Body(item, self.violations, self.names, f"{self.path(name)}[{i}].") for i, item in enumerate(value)]

    def raw(self, name: str) -> Any:
        """Whatever is there, for a reader that takes it apart without recursion."""
        return self._data.get(name)

    def value(self, name: str) -> Any:
        """Any JSON value nested at most ``MAX_DEPTH`` deep: what walks through it later must not run out of stack."""
        value = self._data.get(name)
        if _too_deep(value):
            self.refuse(name, f"is nested more than {MAX_DEPTH} levels deep")
            return None
        return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return False
        level = inner
    return True
