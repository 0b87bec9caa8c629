"""JSON objects that callers send, read strictly: by single fields, or by a dialect's table of fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from specdec.core.fields import MAX_OBJECTS, MAX_PROMPT_TOKENS
from specdec.core.types import OutputParams, Request, SamplingParams, StoppingParams
from specdec.errors import FieldViolation, InvalidRequestError, ViolationCollector

LARGE_BYTES = 1 << 19  # a smaller body is parsed without counting its cost
MAX_COST = MAX_PROMPT_TOKENS + (1 << 16)
"""Of a large body, by `parsing_costs`: the longest prompt of ids, which orjson parses in 80 ms, and some more."""
_MARKS = {b",": 1, b"{": 8, b"[": 16, b":": 8}
_QUOTE = 2


def parsing_costs(pieces: Iterable[bytes]) -> Iterator[int]:
    """After each of ``pieces`` of a JSON text, how long the text so far takes to parse: in numbers of a list that take
    as long, by what separates its values.

    Text in strings costs next to nothing, whatever it contains.
    """
    total, in_string, left = 0, False, b""  # left: a backslash at the end of the last piece
    for piece in pieces:
        unescaped = (left + piece).replace(rb"\\", b"")
        left = unescaped[-1:] if unescaped.endswith(b"\\") else b""
        parts = unescaped.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        quotes = len(parts) - 1
        in_string ^= quotes % 2 == 1
        total += _QUOTE * quotes + sum(cost * outside.count(mark) for mark, cost in _MARKS.items())
        yield total


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``, UTF-8.

    Raises:
        InvalidRequestError: it is not JSON (NaN, infinities and lone surrogates are not), or not an object.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError.of("body", f"is not JSON ({error}); send a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidRequestError.of("body", "must be a JSON object")
    return value


def write_json(value: Any) -> bytes:
    """``value`` as compact JSON; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


_LINE_ENDS = tuple((end.encode(), rb"\u%04x" % ord(end)) for end in "\u2028\u2029\u0085")


def write_line(value: Any) -> bytes:
    """``value`` as compact JSON without any character at which Python splits lines.

    Clients such as Ollama's read lines by httpx, which also splits at U+2028, U+2029 and U+0085. These occur only
    inside strings, where JSON may escape them.
    """
    data = write_json(value)
    if not data.isascii():
        for end, escape in _LINE_ENDS:
            data = data.replace(end, escape)
    return data


MAX_DEPTH = 64
_EXACT = 1 << 53  # a float up to here holds a whole number exactly


class Body:
    """A JSON object whose fields are read one by one. A null field counts as absent.

    A field of the wrong type reads as absent and is added to ``violations``. ``names`` maps the engine's field names to
    those of the body, for violations that are found later.
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
        """The names of all fields, null ones included."""
        return tuple(self._data)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._data.get(name) is not None

    def path(self, name: str) -> str:
        """The field's name, with those of the objects around it in front."""
        return f"{self._path}{name}"

    def refuse(self, name: str, problem: str) -> None:
        """Add a violation for the field."""
        self.violations.check(False, self.path(name), problem)

    def warn(self, name: str, problem: str) -> None:
        """Add a warning about the field to the answer's ``warnings``."""
        self.violations.warnings.append(FieldViolation(self.path(name), problem))

    def text(self, name: str) -> str | None:
        """A string."""
        found: str | None = self._checked(name, lambda value: isinstance(value, str), "must be a string")
        return found

    def needed_text(self, name: str) -> str:
        """A string that must be there; empty if it is missing or wrong."""
        if not self.has(name):
            self.refuse(name, "is needed")
        return self.text(name) or ""

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._checked(name, lambda value: isinstance(value, bool), "must be true or false")
        return default if value is None else bool(value)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._checked(name, is_number, "must be a number")
        return None if value is None else float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``. 3.0 is one."""

        def is_valid(value: Any) -> bool:
            return _is_whole(value) and low <= value <= high

        value = self._checked(name, is_valid, f"must be a whole number from {low} to {high}")
        return None if value is None else int(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Any whole number. ``low`` and ``high`` appear only in the text of a refusal."""
        value = self._checked(name, _is_whole, f"must be a whole number from {low} to {high}")
        return None if value is None else int(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, str) or _is_list_of(str, value)

        value = self._checked(name, is_valid, "must be a string or a list of strings")
        return (value,) if isinstance(value, str) else tuple(value or ())

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers from ``low`` to ``high``."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(type(i) is int and low <= i <= high for i in value)

        return tuple(self._checked(name, is_valid, f"must be a list of whole numbers from {low} to {high}") or ())

    def object(self, name: str) -> Body | None:
        """An object, to be read in turn."""
        value = self._checked(name, lambda value: isinstance(value, dict), "must be an object")
        return None if value is None else Body(value, self.violations, self.names, f"{self.path(name)}.")

    def objects(self, name: str, limit: int = MAX_OBJECTS) -> list[Body]:
        """A list of at most ``limit`` objects, to be read in turn, which are nested no deeper than a `value`."""
        value = self._data.get(name)
        if isinstance(value, list) and len(value) > limit:
            self.refuse(name, f"holds {len(value)} values, at most {limit} may be; send fewer")
            return []
        given = self._checked(name, lambda value: _is_list_of(dict, value), "must be a list of objects")
        if given is None or self.value(name) is None:
            return []
        return [Body(item, self.violations, self.names, f"{self.path(name)}[{i}].") for i, item in enumerate(given)]

    def raw(self, name: str) -> Any:
        """The value as parsed, for a reader that does not recurse into it."""
        return self._data.get(name)

    def value(self, name: str) -> Any:
        """Any JSON value nested at most `MAX_DEPTH` deep, so that code may recurse into it."""
        return self._checked(name, lambda value: not too_deep(value), f"is nested more than {MAX_DEPTH} levels deep")

    def _checked(self, name: str, is_valid: Callable[[Any], bool], rule: str) -> Any:
        """The value, which is refused with ``rule`` unless it is valid or null."""
        value = self._data.get(name)
        if value is None or is_valid(value):
            return value
        self.refuse(name, rule)
        return None


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer() and abs(value) <= _EXACT
    return isinstance(value, int) and not isinstance(value, bool)


def too_deep(value: Any) -> bool:
    """Whether a JSON value is nested more than `MAX_DEPTH` deep."""
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


Schema = Mapping[str, Any]
Reader = Callable[[Body, str], Any]
GRAMMAR_FIELD = "grammar"
# The engine groups the parameters of these records; violations carry the group's name.
GROUPS: dict[type[Any], str] = {SamplingParams: "sampling", StoppingParams: "stopping", OutputParams: "output"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dialect's bodies."""

    name: str
    schema: Schema
    read: Reader | None = None
    """Returns the value, or None and a violation. Without a reader the endpoint reads the field itself."""
    sets: str = ""
    """The engine's field, such as ``sampling.top_k`` or ``priority``. Empty: an option of the endpoint."""
    default: Any = None  # the dialect's own; None: the engine's
    fields: Table = ()
    """Of an object, whose fields count as those of the body."""


Table = tuple[Field, ...]


@dataclass(slots=True)
class RequestFields:
    """What a body asks for. Fields that are absent or wrong have their dialect's default, or are left out."""

    own: dict[str, Any] = field(default_factory=dict)
    """Options of the endpoint, by the body's names."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the request, by the engine's names."""

    def request(self, request_id: str, prompt_ids: tuple[int, ...]) -> Request:
        """A request for one prompt."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS.values()}
        plain: dict[str, Any] = {}
        for name, value in self.engine.items():
            group, _, parameter = name.rpartition(".")
            (groups[group] if group else plain)[parameter] = value
        records = {group: record(**groups[group]) for record, group in GROUPS.items()}
        return Request(request_id=request_id, prompt_ids=prompt_ids, **records, **plain)

    def stop_at(self, token_ids: Iterable[int]) -> None:
        """Also stop at these tokens."""
        known = self.engine.get("stopping.stop_token_ids", ())
        self.engine["stopping.stop_token_ids"] = tuple(dict.fromkeys((*known, *token_ids)))


def read_request(body: Body, table: Table, found: RequestFields | None = None) -> RequestFields:
    """What ``body`` asks for, by the names of ``table``; added to ``found``, if that is given."""
    found = found or RequestFields()
    for each in table:
        values, key = (found.engine, each.sets) if each.sets else (found.own, each.name)
        if each.fields:
            inner = values[key] = body.object(each.name)
            read_request(inner or Body({}, body.violations, body.names), each.fields, found)
        elif each.read is not None:
            value = _read_field(body, each, found) if body.has(each.name) else None
            if value is not None:
                values[key] = value
            elif each.default is not None:
                values.setdefault(key, each.default)
    return found


def _read_field(body: Body, each: Field, found: RequestFields) -> Any:
    assert each.read is not None
    former = body.names.get(each.sets)
    if each.sets:
        body.names[each.sets] = body.path(each.name)
    value = each.read(body, each.name)
    if value is not None and each.sets == GRAMMAR_FIELD and found.engine.get(GRAMMAR_FIELD, value) != value:
        body.refuse(each.name, f"{former} is given too; give one of them")
    return value
